"""``knnlm learn``: a head that stands for a datastore."""

import argparse
import math
from typing import TYPE_CHECKING, Any

from ..errors import KnnlmError
from ..storage import human_bytes
from .parsing import Add

if TYPE_CHECKING:
    import numpy as np

    from ..datastore import Datastore
    from ..heads.objective import Objective


def add_learn_command(add_command: Add) -> None:
    help = "train a head that stands for a datastore, on its keys and values (an interrupted training resumes)"
    add = add_command("learn", learn, help).add_argument
    add("--datastore", required=True, metavar="DIR", help="what to learn from")
    add(
        "--kind", choices=["embedding", "mos", "clusters", "network"], default="embedding",
        help="an output embedding, a mixture of softmaxes, clusters of keys with their words, or a small network "
        "(default: %(default)s)",
    )  # fmt: skip
    add(
        "--rows", default="1x", metavar="SPEC",
        help="of the output embedding: 1x to 9x for every word, frequency:N or loss:N for N on average; of clusters: "
        "so many times the words (default: %(default)s)",
    )  # fmt: skip
    add("--metric", choices=["l2", "ip"], help="score of a row (default: ip; of clusters l2)")
    add("--temperature", type=float, metavar="T", help="of the softmax (default: 1; with L2 the distances' own scale)")
    add(
        "--init", choices=["lm", "random", "centres"],
        help="of the rows: the LM's output embedding (--path), at random, the centres of each word's keys (default: lm "
        "where --path is given, else centres)",
    )  # fmt: skip
    add("--path", metavar="CHECKPOINT", help="of --init lm: the model that made the datastore")
    add("--data", metavar="DATA", help="of --init lm: folder with the model's dict.txt")
    add("--components", type=int, default=2, metavar="R", help="of a mixture of softmaxes (default: %(default)s)")
    add("--depth", type=int, default=2, metavar="N", help="layers of a network (default: %(default)s)")
    add(
        "--embedding", choices=["trained", "fixed"], default="trained",
        help="whether the rows are trained, too, in a mixture of softmaxes or a network (default: %(default)s)",
    )  # fmt: skip
    add("--fine-tune", action="store_true", help="of clusters: train the centroids; their words stay")
    add("--save", metavar="SAVE", help="of --rows loss:N: the datastore's own split, scored with --knn-save")
    add(
        "--interpolated", metavar="SAVE",
        help="train log((1 - lambda) p_LM + lambda p) instead of log p; p_LM from a save of the datastore's own split",
    )  # fmt: skip
    add("--lambda", dest="weight", type=float, metavar="X", help="of --interpolated (default: 0.25)")
    add(
        "--imitate", metavar="TABLE",
        help="half of the loss is the divergence from what the neighbours of each entry say, a table that knnlm "
        "neighbors made with the datastore as --queries",
    )  # fmt: skip
    add("--neighbor-temperature", type=float, metavar="T", help="of --imitate (default: the distances' own scale)")
    add("--valid", metavar="DIR", help="a datastore of other text: training stops when it gets no better there")
    add("--valid-tokens", type=int, metavar="N", help="of --valid: look at its first N entries only (default: all)")
    add("--valid-save", metavar="SAVE", help="of --interpolated with --valid: that text, scored with --knn-save")
    add(
        "--softmax", choices=["auto", "full", "sampled"], default="auto",
        help="in training: over all rows, or estimated from those of the batch and some drawn by frequency (default: "
        "full up to 8,192 rows)",
    )  # fmt: skip
    add("--negatives", type=int, metavar="N", help="words drawn in a step (default: 1024 over the rows of a word)")
    add("--batch", type=int, metavar="N", help="pairs in a step (default: 2048, fewer with several rows per word)")
    add("--epochs", type=float, default=2.0, metavar="N", help="passes over the datastore (default: %(default)g)")
    add("--rate", type=float, default=0.01, metavar="X", help="of learning, at its highest (default: %(default)g)")
    add("--seed", type=int, default=1)
    add("-o", "--output", required=True, metavar="HEAD", help="the folder of the head")


# Flags that mean something to some kinds of heads only: flag -> kinds.
KINDS_OF = {
    "components": ("mos",),
    "depth": ("network",),
    "fine_tune": ("clusters",),
    "embedding": ("mos", "network"),
    "init": ("embedding", "mos", "network"),
    "path": ("embedding", "mos", "network"),
    "save": ("embedding", "mos", "network"),
    "imitate": ("embedding", "mos", "network"),
}


def learn(args: argparse.Namespace) -> int:
    from ..datastore import Datastore
    from ..heads.making import Material, Wanted, learn_head, validation_from
    from ..heads.rows import RowSpec

    _check(args)
    needs_losses = RowSpec.parse(args.rows).by == "loss"
    if args.save and not needs_losses:
        raise KnnlmError("--save does nothing without --rows loss:N; leave it out")
    datastore = Datastore(args.datastore)
    metric = args.metric or ("l2" if args.kind == "clusters" else "ip")
    start = args.init or ("lm" if args.path else "centres")
    wanted = Wanted(
        kind=args.kind, rows=args.rows, metric=metric, temperature=args.temperature, start=start,
        components=args.components, depth=args.depth, embedding=args.embedding, fine_tune=args.fine_tune,
        softmax=args.softmax, negatives=args.negatives, batch=args.batch, epochs=args.epochs, rate=args.rate,
        seed=args.seed,
    )  # fmt: skip
    wanted.check()
    objective = _objective(args, datastore)
    material = Material(objective)
    if start == "lm":
        material.lm_rows = _lm_rows(args, datastore)
    if needs_losses and (args.save or args.interpolated):
        material.word_losses = _word_losses(datastore, args.save or args.interpolated)
    if args.valid:
        valid, lm = Datastore(args.valid), None
        if args.valid_save:
            lm = _lm_log_probs(valid, args.valid_save)
        material.validation = validation_from(datastore, valid, lm, objective.weight, args.valid_tokens)
    facts = learn_head(args.output, datastore, wanted, material)
    results = [each["valid"] for each in facts.training.get("results", []) if "valid" in each]
    found = f", perplexity {math.exp(min(results)):.2f} on {args.valid}" if results else ""
    print(f"{args.output}: {facts.kind}, {facts.row_count:,} rows, {human_bytes(facts.bytes)}{found}")
    print(f"next: fairseq-eval-lm ... --gen-subset valid --knn-head {args.output} --knn-save DIR, then knnlm tune DIR")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse flags that would do nothing."""
    for name, kinds in KINDS_OF.items():
        if args.kind not in kinds and getattr(args, name) != args.parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            raise KnnlmError(f"{flag} does nothing with --kind {args.kind}; it is for {' and '.join(kinds)}")
    pairs = (("weight", "interpolated"), ("neighbor_temperature", "imitate"), ("valid_tokens", "valid"))
    for name, needs in (*pairs, ("valid_save", "interpolated"), ("data", "path"), ("path", "data")):
        if getattr(args, name) is not None and getattr(args, needs) is None:
            flag = "--lambda" if name == "weight" else "--" + name.replace("_", "-")
            raise KnnlmError(f"{flag} goes with --{needs}; give both, or neither")
    if args.path and args.init not in (None, "lm"):
        raise KnnlmError(f"--path does nothing with --init {args.init}; leave out one of them")
    if args.interpolated and bool(args.valid) != bool(args.valid_save):
        raise KnnlmError(
            "with --interpolated the mixture counts in validation, too: give --valid-save, the text of --valid scored "
            "with --knn-save"
        )
    if args.interpolated and args.imitate:
        raise KnnlmError("--interpolated and --imitate are two losses; leave out one of them")
    if args.kind == "clusters" and args.interpolated and not args.fine_tune:
        raise KnnlmError("--interpolated is a loss, and clusters learn by --fine-tune only; add that")
    if args.weight is not None and not 0 < args.weight < 1:
        raise KnnlmError(f"--lambda must be above 0 and below 1, not {args.weight:g}")


def _objective(args: argparse.Namespace, datastore: "Datastore") -> "Objective":
    from ..data.neighbor_table import NeighborTable
    from ..heads.objective import NeighborShares, Objective
    from ..index.temperature import measure_temperature

    if args.interpolated:
        return Objective(_lm_log_probs(datastore, args.interpolated), 0.25 if args.weight is None else args.weight)
    if not args.imitate:
        return Objective()
    table = NeighborTable(args.imitate)
    if table.facts.queries_keys != datastore.fingerprint:
        raise KnnlmError(
            f"{args.imitate} is not of the entries of {datastore.folder}; run knnlm neighbors with it as --queries"
        )
    temperature = args.neighbor_temperature
    if temperature is None:
        temperature = measure_temperature(datastore, table.facts.search.get("metric", "l2"), thorough=False) or 1.0
    if not temperature > 0:
        raise KnnlmError(f"--neighbor-temperature must be above 0, not {temperature:g}")
    return Objective(neighbors=NeighborShares(table, temperature))


def _lm_log_probs(datastore: "Datastore", save: str) -> "np.ndarray":
    from ..saved_runs.alignment import lm_log_probs

    return lm_log_probs(datastore, save.split(","))


def _word_losses(datastore: "Datastore", save: str) -> "np.ndarray":
    """The LM's total loss on each word, (V,)."""
    import numpy as np

    from ..heads.making import vocabulary_of

    losses = -_lm_log_probs(datastore, save).astype(np.float64)
    return np.bincount(datastore.values, losses, minlength=vocabulary_of(datastore))


def _lm_rows(args: argparse.Namespace, datastore: "Datastore") -> Any:
    """The output embedding of the LM, as the datastore's keys are: (V, dim)."""
    import torch

    from ..data.dictionaries import dictionary_facts
    from ..keys import weights_fingerprint
    from ..keys.output_embedding import output_rows
    from ..memory.opening import check_match
    from ..tasks.config import KNNLanguageModelingConfig
    from ..tasks.loading import load_model

    if not args.path:
        raise KnnlmError("--init lm needs the model: give --path CHECKPOINT and --data DATA")
    config = KNNLanguageModelingConfig(data=args.data)
    task, model = load_model(args.path, config)
    check_match(datastore, config, model, weights_fingerprint(model), dictionary_facts(task.target_dictionary))
    rows = output_rows(model)
    return torch.from_numpy(datastore.codec.project(rows.numpy()))
