"""List-major search whose lists are spread over the nodes of a Ray cluster."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import faiss
import numpy as np
import torch

from ..datastore import Datastore
from ..errors import KnnlmError
from ..index.info import IndexInfo, open_index
from ..index.list_files import SortedLists, open_lists
from ..search import ListSearch
from ..search.coarse import CoarseQuantizer
from ..search.early import VisitRule
from ..search.inverted_lists import SEARCH_BYTES
from ..search.list_blocks import FileLists
from ..storage import human_bytes
from .connection import connect
from .list_actor import Assignment
from .nodes import check_copies, check_software, living_nodes, probe
from .placement import Seat, check_memory, choose_device, expected_visits, seats, share_lists
from .remote_visitor import NodeFinder, RemoteVisitor, Traffic

logger = logging.getLogger(__name__)

# Queries are sent in parts while the model works on the next ones, if that is on another node. More parts hide more of
# the search behind the model; but a list is read and decoded once for each part, which pays if so many queries of it
# visit the list.
VISITS_OF_A_LIST = 128
LEAST_PARTS = 4  # of a whole group


class RaySearch(ListSearch):
    """As ``ListSearch``; the coarse step and the far field are here, the lists with their actors."""

    visitors: Sequence[RemoteVisitor]

    def __init__(
        self,
        ray: Any,
        places: list[Seat],
        index: faiss.Index,
        datastore: Datastore,
        info: IndexInfo,
        lists: SortedLists,
        nprobe: int,
        far: int = 0,
        precision: torch.dtype = torch.float32,
        rule: VisitRule | None = None,
    ):
        """places: where the actors live, one for each range of lists"""
        self._ray, self._places, self._info = ray, places, info
        self.traffic = Traffic()
        super().__init__(index, datastore, info.metric, nprobe, lists, far, precision=precision, rule=rule)
        self.early_lists = None  # an actor sees its own lists only, so it does not know which rank they have
        if is_elsewhere(places, ray.get_runtime_context().get_node_id()):
            self.part_queries = part_queries(self.ivf.nlist, self.nprobe, self.preferred_queries)
        self._pool = ThreadPoolExecutor(2 * len(self.visitors))
        self._for_each_visitor(RemoteVisitor.ready)

    def _make_visitors(
        self, lists: SortedLists | None, devices: list[torch.device], resident: bool, precision: torch.dtype
    ) -> list[RemoteVisitor]:
        assert lists is not None
        file_lists = FileLists(lists, self.datastore, self.holds_keys)
        centroids = self.ivf.quantizer.reconstruct_n(0, self.ivf.nlist)
        coarse = CoarseQuantizer(self.ivf, self.metric, torch.device("cpu"))
        visits = expected_visits(coarse, centroids, file_lists.sizes, self.nprobe)
        ranges = share_lists(file_lists.sizes, visits, self._places, lists.file.row_bytes)
        record = asdict(self._info)
        folder = self.datastore.folder.resolve()
        find_node = NodeFinder(self._ray, folder, self.datastore.fingerprint, record)
        visitors = []
        for seat, (first, stop) in zip(self._places, ranges):
            if first < stop:
                device, half = "cuda" if seat.gpu else "cpu", precision == torch.float16 and seat.gpu
                task = Assignment(
                    str(folder), self.datastore.fingerprint, record, first, stop, self.metric, self.holds_keys,
                    seat.threads, seat.processors, device, half,
                )  # fmt: skip
                visitors.append(RemoteVisitor(self._ray, task, seat, file_lists, find_node, self.traffic))
        return visitors

    def _ask(self, question: Any) -> list:
        return list(self._pool.map(question, self.visitors))

    _for_each_visitor = _ask

    @property
    def search_bytes(self) -> int:
        """Every actor sends its candidates, and all of them are here at once."""
        return SEARCH_BYTES // len(self.visitors)

    def _search_plainly(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Of few queries; FAISS would read the lists here."""
        near, _ = self._nearest_lists(queries, far=False)
        vectors = torch.from_numpy(np.ascontiguousarray(queries, np.float32))
        found = self._ask(lambda own: (*own.nearest_plainly(vectors, near, k), np.ones(len(queries), bool)))
        distances, ids, _ = self._nearest_of_all(found, k)
        return distances, ids

    def close(self) -> None:
        """End the actors. They also end when nobody holds this engine any more."""
        for visitor in self.visitors:
            visitor.close()


def is_elsewhere(places: list[Seat], own_node: str) -> bool:
    """Whether some actor is on another node than the model, so that both can work at the same time.

    On one node they would share its processors: nothing is gained, and lists are read once for each part of them.
    """
    return any(seat.node.id != own_node for seat in places)


def part_queries(lists: int, nprobe: int, group: int) -> int:
    """How many queries of a group are sent at a time."""
    return max(1, min(VISITS_OF_A_LIST * lists // nprobe, group // LEAST_PARTS))


def make_ray_search(
    datastore: Datastore,
    info: IndexInfo,
    nprobe: int,
    far: int = 0,
    address: str = "auto",
    device: str = "auto",
    model_dtype: torch.dtype = torch.float32,
    actors: int | None = None,
    rule: VisitRule | None = None,
) -> RaySearch:
    """The engine for an index, on the cluster at this address, after checking that its nodes can serve it.

    Args:
        device: cpu, cuda (an actor for each GPU) or auto
        model_dtype: half precision of the model is half precision of products on a GPU
        rule: which of the nearest lists are not worth a visit
        actors: how many; None: one for each socket or GPU, or as many as the resource "knnlm" of the nodes says
    """
    lists = open_lists(datastore, info)
    index = open_index(datastore, info, warm=False)
    if lists is None or index is None:
        raise KnnlmError(
            f"--knn-engine ray spreads inverted lists, and the index {info.name} of {datastore.folder} has none that "
            "this release wrote; use --knn-index IVF1024,SQfp16 for example, or --knn-engine local"
        )
    ray = connect(address)
    nodes = living_nodes(ray)
    nodes = [node for node in nodes if node.actors_wanted] or nodes
    probe(ray, nodes, datastore.folder, info.name)
    check_software(nodes, ray.__version__)
    check_copies(nodes, datastore.fingerprint, asdict(info))
    list_bytes = int(lists.file.starts[-1]) * lists.file.row_bytes
    check_memory(nodes, list_bytes, datastore.folder.name)
    places = seats(nodes, choose_device(device, nodes, list_bytes), actors)
    engine = RaySearch(ray, places, index, datastore, info, lists, nprobe, far, model_dtype, rule)
    used = {visitor.node.id for visitor in engine.visitors}
    logger.info(
        f"{human_bytes(list_bytes)} of lists of {datastore.folder.name} are served by {len(engine.visitors)} actors on "
        f"{len(used)} nodes"
    )
    return engine
