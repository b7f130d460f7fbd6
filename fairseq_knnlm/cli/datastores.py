"""Commands for datastores and their indexes: build, info, verify, subsample, import."""

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..errors import KnnlmError
from ..storage import to_json
from .parsing import Add

if TYPE_CHECKING:
    from ..datastore import Datastore


def add_datastore_commands(add: Add) -> None:
    build = add("build", _build, "build an index for a datastore (an interrupted build resumes)")
    build.add_argument("datastore", metavar="DIR")
    build.add_argument(
        "--index", default="auto", metavar="SPEC",
        help="auto (a good choice for the size), paper (IVF4096, 64-byte PQ), flat, or a FAISS factory string",
    )  # fmt: skip
    build.add_argument("--metric", choices=["l2", "ip"], default="l2")
    build.add_argument("--name", help="name of the index (default: from SPEC and metric)")
    build.add_argument("--force", action="store_true", help="build again what is there already")
    build.add_argument("--seed", type=int, default=1, help="of the training sample and the clusters")
    build.add_argument("--device", default="cpu", help="that finds lists: cpu, cuda, cuda:N (default: %(default)s)")
    build.add_argument(
        "--drop-keys", action="store_true",
        help="remove the keys once the index holds them: half the disk; what needs them in corpus order gets slower",
    )  # fmt: skip

    info = add("info", _info, "describe a datastore and its indexes", light=True)
    info.add_argument("datastore", metavar="DIR")
    info.add_argument("--json", action="store_true", help="for machines")

    verify = add(
        "verify", _verify,
        "compare a datastore and its indexes (or a save, a table of neighbours, a head) with checksums and each other",
    )  # fmt: skip
    verify.add_argument("datastore", metavar="DIR")
    verify.add_argument("--all", action="store_true", help="check every entry of large indexes, too, not a sample")

    smaller = add("compact", _compact, "copy a datastore with smaller keys: fewer dimensions, 8 bits")
    smaller.add_argument("datastore", metavar="DIR")
    smaller.add_argument(
        "--dim", "--key-dim", type=int, help="dimensions of the new keys, by principal components (default: all)"
    )
    smaller.add_argument(
        "--dtype", "--key-dtype", choices=["float16", "float32", "int8"], default="int8",
        help="of the new keys (default: %(default)s)",
    )  # fmt: skip
    smaller.add_argument("-o", "--output", required=True, metavar="DIR", help="the datastore to create")

    part = add("subsample", _subsample, "copy a random part of a datastore to a datastore of its own")
    part.add_argument("datastore", metavar="DIR")
    part.add_argument("--fraction", type=float, required=True, help="of the entries, above 0 and at most 1")
    part.add_argument("--seed", type=int, default=1)
    part.add_argument("-o", "--output", required=True, metavar="DIR", help="the datastore to create")

    adopt = add("import", _import, "adopt the memory maps and the index that the original implementation writes")
    adopt.add_argument("prefix", help="of PREFIX_keys.npy and PREFIX_vals.npy")
    adopt.add_argument("-o", "--output", required=True, metavar="DIR", help="the datastore to create")
    adopt.add_argument("--dict", required=True, metavar="FILE", help="dict.txt of the data it was made from")
    adopt.add_argument("--index", metavar="FILE", help="its FAISS index, which also tells its size")
    adopt.add_argument("--path", metavar="CHECKPOINT", help="the model that made it, so that scoring can check it")
    adopt.add_argument("--dtype", choices=["float16", "float32"], help="of the keys, where the files do not tell")
    adopt.add_argument("--dim", type=int, help="dimension of the keys, where the files do not tell")
    adopt.add_argument("--size", type=int, metavar="N", help="import the first N entries only (default: all)")
    adopt.add_argument("--key", default="ffn_input_ln", help="which state the keys are (default: %(default)s)")
    adopt.add_argument("--layer", type=int, default=-1, help="of which layer (default: the last)")


def _build(args: argparse.Namespace) -> int:
    from ..datastore import Datastore
    from ..index import build_index, index_name
    from ..index.info import check_name, find_index
    from ..machine import building_device

    datastore, device = Datastore(args.datastore), building_device(args.device, flag="--device")
    if args.name is not None:
        check_name(args.name)
    before = find_index(datastore, args.name or index_name(args.index, args.metric))
    info = build_index(datastore, args.index, args.metric, args.name, args.seed, args.force, device)
    if info == before and not args.force:
        print(f"the index {info.name} is there already; --force builds it again")
    if args.drop_keys:
        from ..index.drop_keys import drop_keys

        drop_keys(datastore, info)
    return 0


def _compact(args: argparse.Namespace) -> int:
    from ..datastore import Datastore
    from ..datastore.compact import compact, describe_keys

    datastore = compact(Datastore(args.datastore), args.dim, args.dtype, args.output)
    print(f"{args.output}: {len(datastore):,} entries, keys of {describe_keys(datastore)}")
    return 0


def _info(args: argparse.Namespace) -> int:
    from ..datastore import Datastore
    from ..datastore.compact import describe_keys
    from ..index import list_indexes
    from ..index.list_files import bytes_on_disk
    from ..storage import human_bytes

    datastore = Datastore(args.datastore)
    manifest, indexes = datastore.manifest, list_indexes(datastore)
    indexes_bytes = [bytes_on_disk(datastore, index) for index in indexes]
    if args.json:
        content = asdict(manifest)
        content["bytes"] = datastore.bytes_on_disk
        content["indexes"] = [
            {**asdict(index), "bytes_on_disk": size} for index, size in zip(indexes, indexes_bytes)
        ]
        print(to_json(content, indent=1))
        return 0
    rows = [
        ("entries", f"{len(datastore):,}"),
        ("keys", f"{describe_keys(datastore)}; {manifest.key} of layer {manifest.layer}"),
        ("values", manifest.value_dtype),
        *([("weights", _describe_weights(datastore))] if datastore.is_weighted else []),
        ("on disk", f"{human_bytes(datastore.bytes_on_disk)} in {len(manifest.shards)} shards"),
        ("per entry", f"{(datastore.bytes_on_disk + sum(indexes_bytes)) / len(datastore):,.0f} bytes with all indexes"),
        *((name.replace("_", " "), str(value)) for name, value in manifest.source.items()),
    ]
    for index in indexes:
        size = f", {human_bytes(index.bytes)}, built in {index.seconds:.0f}s" if index.factory else ""
        rows.append((f"index {index.name}", f"{index.factory or 'flat'}, {index.metric}{size}"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def _describe_weights(datastore: "Datastore") -> str:
    weights = datastore.weights
    assert weights is not None
    return f"{weights.min():.4g} to {weights.max():.4g}, {weights.sum(dtype=float):,.0f} together"


def _verify(args: argparse.Namespace) -> int:
    from ..progress import progress, say
    from .verification import verify_folder

    problems = 0
    with progress("verifying", 0, " checks") as bar:
        for check in verify_folder(args.datastore, args.all):
            bar.update()
            if check.problem:
                problems += 1
                say(f"error: {check.what}: {check.problem}", sys.stderr)
            elif not check.what.endswith(".npy"):
                say(f"ok: {check.what}", sys.stdout)
    print(f"{args.datastore}: {f'{problems} problems' if problems else 'all is well'}")
    return 1 if problems else 0


def _subsample(args: argparse.Namespace) -> int:
    from ..datastore import Datastore
    from ..datastore.subsample import subsample

    datastore = subsample(Datastore(args.datastore), args.fraction, args.seed, args.output)
    print(f"{args.output}: {len(datastore):,} entries; its index is built when it is used, or by knnlm build")
    return 0


def _import(args: argparse.Namespace) -> int:
    from ..keys import KEYS
    from ..original.importer import import_datastore
    from ..tasks.loading import read_model

    if args.key not in KEYS:
        raise KnnlmError(f"--key {args.key} is unknown; choose one of {', '.join(KEYS)}")
    dictionary = _read_dictionary(args.dict)
    model = read_model(args.path, args.dict, args.layer) if args.path else None
    imported = import_datastore(
        args.prefix, args.output, dictionary, args.key, args.layer, args.dim, args.size, args.dtype, args.index, model
    )
    done = "imported" if imported.copied else "there already"
    index = f"; {imported.index}" if imported.index else ""
    print(f"{args.output}: {len(imported.datastore):,} entries {done}{index}")
    return 0


def _read_dictionary(path: str) -> dict:
    from fairseq.data import Dictionary

    from ..data.dictionaries import dictionary_facts

    try:
        dictionary = Dictionary.load(path)
    except Exception as error:  # fairseq raises nearly anything for a file that is something else
        why = " ".join(str(error).split())
        raise KnnlmError(f"{path} is not a fairseq dictionary ({why:.200}); give the dict.txt of the data") from error
    if len(dictionary) == dictionary.nspecial:
        raise KnnlmError(f"{path} holds no words; give the dict.txt of the data")
    return dictionary_facts(dictionary)
