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
from ..memory.presets import flag

if TYPE_CHECKING:  # classes that are made when the program runs are no types
    KEY_CHOICES = str
    KEY_DTYPE_CHOICES = str
    METRIC_CHOICES = str
    MASK_CHOICES = str
    SCORE_CHOICES = str
    ENGINE_CHOICES = str
else:
    KEY_CHOICES = ChoiceEnum(list(KEYS))
    KEY_DTYPE_CHOICES = ChoiceEnum(["float16", "float32", "int8"])
    METRIC_CHOICES = ChoiceEnum(["l2", "ip"])
    MASK_CHOICES = ChoiceEnum(["index", "exact"])
    SCORE_CHOICES = ChoiceEnum(["exact", "index"])
    ENGINE_CHOICES = ChoiceEnum(["local", "ray"])


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
    knn_dry_run: bool = field(
        default=False,
        metadata=_help("with --knn-dump: say what it would write, how long it would take, and write nothing"),
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
    knn_datastore: Optional[str] = field(default=None, metadata=_help("score with these datastores: DIR[,DIR...]"))
    knn_preset: Optional[str] = field(
        default=None,
        metadata=_help(
            "paper: the published setting in one flag: --knn-index paper --knn-k 1024 --knn-lambda 0.25 "
            "--knn-temperature 1; fast: --knn-k all --knn-nprobe 16 --knn-far 64; those of them that are given win"
        ),
    )
    knn_k: Optional[str] = field(
        default=None,
        metadata=_help(
            "all: every entry of the visited lists, exactly and with no selection, and further lists as --knn-far "
            "says; or a number of neighbours per query "
            "(default: all, or what knnlm tune --keep stored; 1024 where the index or --knn-score needs a number)"
        ),
    )
    knn_lambda: Optional[str] = field(
        default=None,
        metadata=_help(
            "weight of the kNN distribution: one value for each datastore, or one per datastore (a,b,...) (default: "
            "what knnlm tune --keep stored, else 0.25)"
        ),
    )
    knn_temperature: Optional[str] = field(
        default=None,
        metadata=_help(
            "softmax temperature of the kNN distribution: one value, or one per datastore (a,b,...) (default: what "
            "knnlm tune --keep stored, else one at the scale of the datastore's own neighbour distances)"
        ),
    )
    knn_nprobe: Optional[int] = field(default=None, metadata=_help("inverted lists visited per query (default: 32)"))
    knn_far: Optional[int] = field(
        default=None,
        metadata=_help(
            "with --knn-k all: so many more lists of each query take part, each as one Gaussian, at next to no cost; "
            "0: none (default: 64; with --knn-nprobe, another metric than l2, or an index without the keys 0)"
        ),
    )
    knn_device: str = field(
        default="auto",
        metadata=_help(
            "where the search runs: cpu, cuda, cuda:N, several GPUs (cuda:0,cuda:1), or auto (the model's GPU if the "
            "lists fit)"
        ),
    )
    knn_engine: ENGINE_CHOICES = field(
        default="local",
        metadata=_help(
            "who searches: this process, or a Ray cluster whose nodes have a range of the index's lists each (extra "
            "ray)"
        ),
    )
    knn_ray_address: str = field(
        default="auto",
        metadata=_help(
            "with --knn-engine ray: auto (the cluster that this machine belongs to), HOST:PORT of its head, or local "
            "(this machine alone)"
        ),
    )
    knn_metric: METRIC_CHOICES = field(default="l2", metadata=_help("squared L2 distance or inner product"))
    knn_mask: MASK_CHOICES = field(
        default="index",
        metadata=_help("which neighbours: those that the index returns, or the exact ones (slow: reads every key)"),
    )
    knn_score: SCORE_CHOICES = field(
        default="exact",
        metadata=_help("which distances: exact ones with the stored keys, or the index's own approximation"),
    )
    # learned heads
    knn_head: Optional[str] = field(
        default=None,
        metadata=_help("mix in these heads, which knnlm learn trained: HEAD[,HEAD...]; alone or beside datastores"),
    )
    knn_head_lambda: Optional[str] = field(
        default=None,
        metadata=_help(
            "weight of each head: one value for all, or one per head (a,b,...) (default: what knnlm tune --keep "
            "stored, else 0.25)"
        ),
    )
    # continuous cache
    knn_cache_size: int = field(
        default=0,
        metadata=_help(
            "continuous cache: the last N tokens of the scored text are one more memory; 0 is none. Its states are "
            "the first datastore's key, or --knn-key"
        ),
    )
    knn_cache_lambda: Optional[float] = field(
        default=None,
        metadata=_help("weight of the cache distribution (default: what knnlm tune --keep stored, else 0.1)"),
    )
    knn_cache_theta: Optional[float] = field(
        default=None,
        metadata=_help(
            "sharpness of the cache: shares are proportional to exp(theta * h_t . h_i) (default: what knnlm tune "
            "--keep stored, else 0.1)"
        ),
    )
    knn_cache_boundary: Optional[str] = field(
        default=None,
        metadata=_help(
            "forget the previous document after this line of the scored text, as it was tokenised ('' is an empty "
            "line); re:PATTERN takes every line that the regular expression matches as a whole"
        ),
    )
    # gate
    knn_gate: Optional[str] = field(
        default=None,
        metadata=_help(
            "weights of LM and memories for each token by its context, as knnlm gate has learnt them; also decides "
            "temperatures and theta"
        ),
    )
    knn_gate_skip: float = field(
        default=0.0,
        metadata=_help(
            "with --knn-gate: leave out this share of the list visits, where they matter least, before any list is read"
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
    knn_save_top: int = field(
        default=0,
        metadata=_help(
            "with --knn-save: also keep the N most probable tokens of the LM and their probabilities, for each token "
            "of the text (4 to 6 bytes each): soft labels for --criterion soft_labels (0: none)"
        ),
    )


def flags() -> list[str]:
    """As a user types them."""
    names = (setting.name for setting in fields(KNNLanguageModelingConfig))
    return ["--" + name.replace("_", "-") for name in names if name.startswith("knn_")]


def check_dump_flags(args: Any, targets: list[str], models: int) -> None:
    """Refuse what a dump cannot do."""
    if models > 1:
        raise KnnlmError(f"a datastore holds keys of one model, and --path names {models}; give --path only one")
    flag(args, "knn_index")  # refuses an unknown preset
    if args.knn_datastore:
        raise KnnlmError("--knn-dump and --knn-datastore are two runs: dump first, then score")
    if args.knn_cache_size or args.knn_save or args.knn_save_top or args.knn_head or args.knn_gate:
        flags = "--knn-cache-size, --knn-head, --knn-gate, --knn-save and --knn-save-top"
        raise KnnlmError(f"{flags} are for scoring; dump without them")
    if str(args.knn_engine) == "ray":
        raise KnnlmError("--knn-engine is for scoring; dump with the nodes of a Ray cluster by knnlm cluster dump")
    if targets != ["future"]:
        raise KnnlmError("a datastore holds next tokens; dump without --self-target and --past-target")


def refuse_idle_flags(args: Any) -> None:
    """A flag that does nothing is a mistake worth hearing of."""
    for option in fields(KNNLanguageModelingConfig):
        if not option.name.startswith("knn_") or str(getattr(args, option.name)) == str(option.default):
            continue
        cached, needs = args.knn_cache_size, "--knn-datastore or --knn-dump"
        if option.name == "knn_save":
            continue
        if option.name == "knn_save_top":
            if not args.knn_save:
                raise KnnlmError("--knn-save-top does nothing without --knn-save; add it, or leave this out")
            continue
        if option.name.startswith("knn_cache"):
            idle, needs = not cached, "--knn-cache-size"
        elif option.name.startswith("knn_head"):
            idle, needs = not args.knn_head, "--knn-head"
        elif option.name == "knn_gate":
            idle = not (args.knn_datastore or args.knn_head or cached)
            needs = "--knn-datastore, --knn-head or --knn-cache-size"
        elif option.name == "knn_gate_skip":
            idle, needs = not args.knn_gate, "--knn-gate"
        elif option.name == "knn_ray_address":
            idle, needs = str(args.knn_engine) != "ray", "--knn-engine ray"
        elif option.name == "knn_dry_run":
            idle, needs = True, "--knn-dump"
        elif option.name in ("knn_key_dtype", "knn_key_dim"):
            idle, needs = True, "--knn-dump: a datastore's keys stay as they are"
        elif option.name in ("knn_key", "knn_layer"):
            idle = not (args.knn_datastore or args.knn_head or cached)
        else:
            idle = not args.knn_datastore
        if idle:
            name = "--" + option.name.replace("_", "-")
            raise KnnlmError(f"{name} does nothing without {needs}; add one, or leave it out")
