"""``knnlm learn``: from a datastore to a head on disk."""

import json
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..datastore import Datastore
from ..errors import KnnlmError, resumable
from ..index.temperature import measure_temperature
from ..storage import Lock, check_disk_space, human_bytes, make_folder, to_json
from .clusters import cluster_keys, count_words, drop_empty
from .head import Head
from .head_file import HeadFacts, is_head_file, save_head
from .initial import away_by_frequency, centre_rows, key_sample, random_rows, rows_from_words
from .learning import FULL_ROWS, Learning, Plan, Validation
from .learning_state import LearningState
from .objective import Objective
from .pairs import ShuffledPairs
from .rows import RowLayout, RowSpec
from .trunks import make_trunk

logger = logging.getLogger(__name__)

VALID_TOKENS = 1 << 14  # at most, evenly spread over the validation datastore
TOKENS_FOR_TEMPERATURE = 2048
SOFTMAXES = ("auto", "full", "sampled")


@dataclass
class Wanted:
    """What a head is to be: the flags of ``knnlm learn``."""

    kind: str = "embedding"
    rows: str = "1x"
    metric: str = "ip"
    temperature: float | None = None
    start: str = "centres"  # of the rows: lm, random, centres
    components: int = 2
    depth: int = 2
    embedding: str = "trained"  # or fixed
    fine_tune: bool = False
    softmax: str = "auto"
    negatives: int | None = None
    batch: int | None = None
    epochs: float = 2.0
    rate: float = 0.01
    seed: int = 1

    def check(self) -> None:
        """Refuse what makes no sense before anything is read."""
        for name, least in (("components", 1), ("depth", 1), ("batch", 1), ("negatives", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise KnnlmError(f"--{name} must be {least} or more, not {value}")
        for name in ("epochs", "rate", "temperature"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise KnnlmError(f"--{name} must be above 0, not {value:g}")
        if self.kind == "clusters" and RowSpec.parse(self.rows).by != "equal":
            raise KnnlmError(f"clusters belong to no word, so --rows takes 1x to 9x here, not {self.rows}")
        if self.negatives is not None and self.softmax == "full":
            raise KnnlmError("--negatives does nothing with --softmax full; leave out one of them")


@dataclass
class Material:
    """What a head is learnt from, besides the datastore."""

    objective: Objective
    lm_rows: Tensor | None = None  # (V, dim) the LM's output embedding, as keys are
    word_losses: np.ndarray | None = None  # (V,) the LM's total loss on each word
    validation: Validation | None = None


def learn_head(folder: str | Path, datastore: Datastore, wanted: Wanted, material: Material) -> HeadFacts:
    """Make a head, or go on with one that a killed process left; what head.json says of it."""
    wanted.check()
    folder = Path(folder)
    if datastore.is_weighted:
        raise KnnlmError(
            f"the entries of {datastore.folder} have weights, and a head would count each of them once; learn from the "
            "datastore that it was pruned from, or from one that knnlm prune --no-weights made"
        )
    if folder.exists():
        raise KnnlmError(f"{folder} exists already; choose another -o, or delete it")
    make_folder(folder.parent)
    work = folder.with_name(folder.name + ".partial")
    with Lock(folder.with_name(folder.name + ".lock"), f"learning {folder}", wait=False, instead="choose another -o"):
        if work.exists() and any(not is_head_file(path.name) for path in work.iterdir() if ".tmp" not in path.name):
            raise KnnlmError(f"{work} is in the way and was not written by knnlm learn; move it elsewhere")
        with resumable("the same command goes on with the last validation"):
            return _make(folder, work, datastore, wanted, material)


def _make(folder: Path, work: Path, datastore: Datastore, wanted: Wanted, material: Material) -> HeadFacts:
    vocabulary = vocabulary_of(datastore)
    frequencies = np.bincount(datastore.values, minlength=vocabulary)
    cluster = None
    if wanted.kind == "clusters":
        head, cluster = _clusters(datastore, wanted, vocabulary, material)
        frequencies = torch.bincount(cluster, minlength=len(head.rows)).numpy()
    else:
        head = _embedding(datastore, wanted, frequencies, material)
    head.projection = None if datastore.codec.projection is None else torch.from_numpy(datastore.codec.projection)
    trains = wanted.kind != "clusters" or wanted.fine_tune
    size = 4 * head.rows.numel()
    logger.info(f"{wanted.kind}: {len(head.rows):,} rows of {head.rows.size(1)}, {human_bytes(size)}")
    check_disk_space(folder.parent, (6 if trains else 1) * size, "learning this head")
    facts = _facts(datastore, wanted, head, vocabulary)
    identity = json.loads(to_json(asdict(facts) | {"wanted": asdict(wanted), "objective": material.objective.name}))
    if trains:
        learning = _learning(head, datastore, wanted, material, frequencies, cluster)
        logger.info(learning.describe())
        facts.training |= {
            "softmax": "sampled" if learning.plan.negatives else "full", "negatives": learning.plan.negatives,
            "batch": learning.pairs.batch, "steps": learning.total,
        }  # fmt: skip
        state = LearningState(work, identity)
        learning.run(state)
        facts.training |= {"results": learning.results, "kept_step": state.best_step or learning.total}
    elif material.validation is not None:
        facts.training |= {"results": [{"step": 0, "valid": round(material.validation.loss(head), 5)}]}
    return save_head(folder, head, facts, work)


def _facts(datastore: Datastore, wanted: Wanted, head: Head, vocabulary: int) -> HeadFacts:
    manifest = datastore.manifest
    is_mos, is_network = wanted.kind == "mos", wanted.kind == "network"
    return HeadFacts(
        kind=wanted.kind,
        key=manifest.key,
        layer=manifest.layer,
        dim=datastore.dim,
        source_dim=manifest.source_dim,
        vocabulary=vocabulary,
        source=manifest.source,
        datastore_keys=datastore.fingerprint,
        entries=len(datastore),
        rows=wanted.rows,
        row_count=len(head.rows),
        metric=wanted.metric,
        temperature=head.temperature,
        components=wanted.components if is_mos else 0,
        depth=wanted.depth if is_network else 0,
        training={"wanted": asdict(wanted)},
    )


def vocabulary_of(datastore: Datastore) -> int:
    """How many words there are; an imported datastore may not say."""
    size = datastore.manifest.source.get("dictionary_size")
    return size if isinstance(size, int) else int(datastore.values.max()) + 1


def _embedding(datastore: Datastore, wanted: Wanted, frequencies: np.ndarray, material: Material) -> Head:
    """An output embedding before training, with its trunk."""
    spec = RowSpec.parse(wanted.rows)
    if spec.by == "loss":
        if material.word_losses is None:
            raise KnnlmError(
                f"--rows {wanted.rows} needs the LM's loss on each word: score the datastore's own split with "
                "--knn-save SAVE, and give it as --save SAVE"
            )
        frequencies = material.word_losses
    layout = RowLayout(torch.from_numpy(spec.counts(frequencies)))
    temperature = _temperature(datastore, wanted)
    if wanted.start == "lm":
        if material.lm_rows is None:
            raise KnnlmError("--init lm needs the model: give --path CHECKPOINT and --data DATA")
        rows = rows_from_words(material.lm_rows, layout, wanted.seed)
    elif wanted.start == "centres":
        rows = centre_rows(layout, datastore, wanted.metric, wanted.seed, temperature)
    else:
        rows = random_rows(layout, datastore, wanted.metric, wanted.seed)
    if wanted.metric == "l2" and wanted.start != "lm":
        rows += away_by_frequency(np.bincount(datastore.values, minlength=len(layout)), layout, datastore, temperature)
    torch.manual_seed(wanted.seed)
    size = 3 * float(key_sample(datastore).std())
    trunk = make_trunk(wanted.kind, datastore.dim, wanted.components, wanted.depth, size)
    return Head(rows.contiguous(), layout, wanted.metric, temperature, trunk)


def _temperature(datastore: Datastore, wanted: Wanted) -> float:
    """Of the flag; else 1 for inner products, whose rows have any length, and for L2 the distances' own scale."""
    if wanted.temperature is not None:
        return wanted.temperature
    return 1.0 if wanted.metric == "ip" else measure_temperature(datastore, "l2", thorough=False) or 1.0


def _clusters(datastore: Datastore, wanted: Wanted, vocabulary: int, material: Material) -> tuple[Head, Tensor]:
    """Clusters with their words, at the best temperature, and the cluster of each entry."""
    count = int(RowSpec.parse(wanted.rows).average) * vocabulary
    centroids, cluster = drop_empty(*cluster_keys(datastore, count, wanted.seed))
    words = count_words(cluster, datastore.values, len(centroids), vocabulary)
    head = Head(centroids, words, wanted.metric, _temperature(datastore, wanted))
    if wanted.temperature is None:
        keys, targets = _some_tokens(datastore, material.validation)
        head.temperature = best_temperature(head, keys, targets)
        logger.info(f"temperature {head.temperature:g}, at which clusters predict {len(targets):,} tokens best")
    return head, cluster


def _some_tokens(datastore: Datastore, validation: Validation | None) -> tuple[Tensor, Tensor]:
    """Tokens to choose a temperature on: of the validation datastore, else of the datastore itself."""
    if validation is not None:
        every = max(1, len(validation.targets) // TOKENS_FOR_TEMPERATURE)
        return validation.keys[::every], validation.targets[::every]
    entries = np.linspace(0, len(datastore) - 1, min(TOKENS_FOR_TEMPERATURE, len(datastore))).astype(np.int64)
    keys = torch.from_numpy(datastore.gather_keys(entries).astype(np.float32))
    return keys, torch.from_numpy(datastore.values[entries].astype(np.int64))


def best_temperature(head: Head, keys: Tensor, targets: Tensor) -> float:
    """The one with the least loss, to within a fifth: doubles and halves first, then steps half as large, twice."""
    losses: dict[float, float] = {}

    def loss(power: float) -> float:
        if power not in losses:
            other = Head(head.rows, head.words, head.metric, head.temperature * 2.0**power, head.trunk)
            losses[power] = Validation(keys, targets).loss(other)
        return losses[power]

    best = min(map(float, range(-4, 5)), key=loss)
    for step in (0.5, 0.25):
        best = min((best - step, best, best + step), key=loss)
    return float(f"{head.temperature * 2.0**best:.4g}")


def _learning(
    head: Head, datastore: Datastore, wanted: Wanted, material: Material, frequencies: np.ndarray,
    cluster: Tensor | None,
) -> Learning:  # fmt: skip
    average = len(head.rows) / len(frequencies)
    batch = wanted.batch or (2048 if average < 2 else 1024 if average < 6 else 512)
    sampled = wanted.softmax == "sampled" or (wanted.softmax == "auto" and len(head.rows) > FULL_ROWS)
    negatives = (wanted.negatives or max(128, round(1024 / average))) if sampled else 0
    train_rows = wanted.embedding == "trained"
    if not train_rows and wanted.kind == "embedding":
        raise KnnlmError("--embedding fixed leaves nothing to learn; use it with --kind mos or --kind network")
    plan = Plan(wanted.epochs, wanted.rate, wanted.seed, negatives, train_rows)
    pairs = ShuffledPairs(datastore, batch, wanted.seed)
    return Learning(head, pairs, material.objective, plan, frequencies, material.validation, cluster)


def validation_from(
    datastore: Datastore, valid: Datastore, lm: np.ndarray | None, weight: float, first: int | None = None
) -> Validation:
    """Tokens of another datastore of the same model, spread evenly.

    Args:
        lm: (entries of valid,) log p_LM of each value, where the mixture counts
        first: look at so many entries of the beginning only
    """
    if first is not None and not 1 <= first <= len(valid):
        raise KnnlmError(f"--valid-tokens must be 1 to {len(valid):,}, the entries of {valid.folder}, not {first}")
    ours, theirs = datastore.manifest, valid.manifest
    same = all(getattr(ours, name) == getattr(theirs, name) for name in ("key", "layer", "source_dim"))
    same &= all(
        ours.source.get(name) == theirs.source.get(name) for name in ("checkpoint_sha256", "dictionary_sha256")
    )
    if not same or theirs.projection not in (None, ours.projection):
        raise KnnlmError(
            f"{valid.folder} has other keys than {datastore.folder} (model, key, layer or projection); dump the "
            "validation split as the datastore was"
        )
    count = first or len(valid)
    entries = np.linspace(0, count - 1, min(VALID_TOKENS, count)).astype(np.int64)
    keys = valid.gather_keys(entries).astype(np.float32)
    keys = keys if theirs.projection is not None else datastore.codec.project(keys)
    targets = torch.from_numpy(valid.values[entries].astype(np.int64))
    kept = None if lm is None else torch.from_numpy(lm[entries].astype(np.float32))
    return Validation(torch.from_numpy(np.ascontiguousarray(keys)), targets, kept, weight)
