"""Every flag, its default and its help.

The flags live in the task because ``fairseq-eval-lm`` has no ``--arch``, and all begin with ``--knn-`` because fairseq
swallows collisions silently. ``Optional[X]`` is spelled out: fairseq's parser does not know ``X | None``.
"""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.tasks.language_modeling import LanguageModelingConfig

from ..errors import KnnlmError
from ..keys import KEYS

if TYPE_CHECKING:  # classes that are made when the program runs are no types
    KEY_CHOICES = str
    KEY_DTYPE_CHOICES = str
    METRIC_CHOICES = str
    MASK_CHOICES = str
    SCORE_CHOICES = str
else:
    KEY_CHOICES = ChoiceEnum(list(KEYS))
    KEY_DTYPE_CHOICES = ChoiceEnum(["float16", "float32", "int8"])
    METRIC_CHOICES = ChoiceEnum(["l2", "ip"])
    MASK_CHOICES = ChoiceEnum(["index", "exact"])
    SCORE_CHOICES = ChoiceEnum(["exact", "index"])


def _help(text: str) -> dict:
    return {"help": text}


@dataclass
class KNNLanguageModelingConfig(LanguageModelingConfig):
    # memorise
    knn_dump: Optional[str] = field(
        default=None,
        metadata=_help(
            "write the keys and values of --gen-subset to the datastore DIR; an interrupted dump resumes, and "
            "--num-shards N --shard-id I does one contiguous part of it"
        ),
    )
    knn_key: Optional[KEY_CHOICES] = field(
        default=None,
        metadata=_help(
            "which state of the decoder layer is the key (default: ffn_input_ln when dumping, the datastore's own "
            "when scoring)"
        ),
    )
    knn_layer: Optional[int] = field(
        default=None,
        metadata=_help(
            "which decoder layer gives the key; negative counts from the end (default: the last when dumping, the "
            "datastore's own when scoring)"
        ),
    )
    knn_key_dtype: KEY_DTYPE_CHOICES = field(
        default="float16",
        metadata=_help("how keys are stored; int8 takes half of float16's space, with a range for each dimension"),
    )
    knn_key_dim: Optional[int] = field(
        default=None,
        metadata=_help(
            "store keys projected to so many dimensions, the principal components of a sample of the same split "
            "(default: all)"
        ),
    )
    # index
    knn_index: Optional[str] = field(
        default=None,
        metadata=_help(
            "a preset (auto, paper, flat) or any FAISS factory string: built after a dump, or when scoring if it is "
            "missing (default when scoring: auto, or the only index there is)"
        ),
    )
    # score
    knn_datastore: Optional[str] = field(
        default=None, metadata=_help("score with these datastores: DIR[,DIR...]")
    )
    knn_k: str = field(
        default="1024",
        metadata=_help(
            "neighbours per query, or 'all': every entry of the visited clusters, exactly, with no selection"
        ),
    )
    knn_lambda: str = field(
        default="0.25",
        metadata=_help("weight of the kNN distribution: one value for each datastore, or one per datastore (a,b,...)"),
    )
    knn_temperature: float = field(default=1.0, metadata=_help("softmax temperature of the kNN distribution"))
    knn_nprobe: int = field(default=32, metadata=_help("clusters visited per query by an IVF index"))
    knn_far: int = field(
        default=0,
        metadata=_help(
            "with --knn-k all: so many more lists of each query take part, each as one Gaussian, at next to no cost "
            "(0: none; 64 is worth as much as two to four times --knn-nprobe)"
        ),
    )
    knn_device: str = field(
        default="auto",
        metadata=_help("where the search runs: cpu, cuda, cuda:N, or auto (the model's GPU if the lists fit)"),
    )
    knn_metric: METRIC_CHOICES = field(
        default="l2", metadata=_help("squared L2 distance or inner product")
    )
    knn_mask: MASK_CHOICES = field(
        default="index",
        metadata=_help("which neighbours: those that the index returns, or the exact ones (slow: reads every key)"),
    )
    knn_score: SCORE_CHOICES = field(
        default="exact",
        metadata=_help("which distances: exact ones with the stored keys, or the index's own approximation"),
    )
    # continuous cache
    knn_cache_size: int = field(
        default=0,
        metadata=_help(
            "continuous cache: the last N tokens of the scored text are one more memory; 0 is none. Its states are "
            "the first datastore's key, or --knn-key"
        ),
    )
    knn_cache_lambda: float = field(default=0.1, metadata=_help("weight of the cache distribution"))
    knn_cache_theta: float = field(
        default=0.1, metadata=_help("sharpness of the cache: shares are proportional to exp(theta * h_t . h_i)")
    )
    knn_cache_boundary: Optional[str] = field(
        default=None,
        metadata=_help(
            "forget the previous document after this line of the scored text, as it was tokenised ('' is an empty "
            "line); re:PATTERN takes every line that the regular expression matches as a whole"
        ),
    )
    # keep
    knn_save: Optional[str] = field(
        default=None,
        metadata=_help(
            "keep LM scores, neighbours' distances and cache similarities of the scored split in DIR, so that knnlm "
            "tune and knnlm sweep need neither model nor search"
        ),
    )


def check_dump_flags(args: Any, targets: list[str]) -> None:
    """Refuse what a dump cannot do."""
    if args.knn_datastore:
        raise KnnlmError("--knn-dump and --knn-datastore are two runs: dump first, then score")
    if args.knn_cache_size or args.knn_save:
        raise KnnlmError("--knn-cache-size and --knn-save are for scoring; dump without them")
    if targets != ["future"]:
        raise KnnlmError("a datastore holds next tokens; dump without --self-target and --past-target")


def refuse_idle_flags(args: Any) -> None:
    """A flag that does nothing is a mistake worth hearing of."""
    for flag in fields(KNNLanguageModelingConfig):
        if not flag.name.startswith("knn_") or str(getattr(args, flag.name)) == str(flag.default):
            continue
        cached, needs = args.knn_cache_size, "--knn-datastore or --knn-dump"
        if flag.name == "knn_save":
            continue
        if flag.name.startswith("knn_cache"):
            idle, needs = not cached, "--knn-cache-size"
        elif flag.name in ("knn_key_dtype", "knn_key_dim"):
            idle, needs = True, "--knn-dump: a datastore's keys stay as they are"
        elif flag.name in ("knn_key", "knn_layer"):
            idle = not (args.knn_datastore or cached)
        else:
            idle = not args.knn_datastore
        if idle:
            name = "--" + flag.name.replace("_", "-")
            raise KnnlmError(f"{name} does nothing without {needs}; add one, or leave it out")
