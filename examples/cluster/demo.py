"""The demo's datastore spread over three Ray nodes, one of which is killed while the test split is scored.

    python examples/cluster/demo.py --demo demo        # after make demo

All nodes are processes of this machine, each with a copy of the datastore in a folder of its own, as three machines
without a shared file system would have it. The perplexity has to be the same three times: without a cluster, with it,
and with it while one node dies.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from ray.cluster_utils import Cluster

REPOSITORY = Path(__file__).resolve().parents[2]
NODES = 3
SERVED = "are served by"  # the plugin's line when all actors have opened their lists
LOST = "was lost; another one starts"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("demo"), help="of make demo (default: %(default)s)")
    parser.add_argument("--data", type=Path, help="(default: DEMO/bin)")
    parser.add_argument("--path", type=Path, help="checkpoint (default: DEMO/checkpoints/checkpoint_best.pt)")
    parser.add_argument("--datastore", type=Path, help="(default: DEMO/datastore)")
    parser.add_argument("--tokens-per-sample", default="256")
    parser.add_argument("--context-window", default="128")
    parser.add_argument("--flags", default="", help="more flags of fairseq-eval-lm, in one word")
    args = parser.parse_args()
    store = args.datastore or args.demo / "datastore"
    command = [
        sys.executable, "-m", "fairseq_cli.eval_lm", args.data or args.demo / "bin",
        "--path", args.path or args.demo / "checkpoints/checkpoint_best.pt", "--gen-subset", "test",
        "--user-dir", REPOSITORY / "fairseq_knnlm", "--task", "knn_language_modeling", "--knn-datastore", store,
        "--sample-break-mode", "none", "--tokens-per-sample", args.tokens_per_sample,
        "--context-window", args.context_window, "--max-tokens", "2048", "--no-progress-bar", *args.flags.split(),
    ]  # fmt: skip
    results = {"one process": score(command)}
    folders = [args.demo / "nodes" / str(number) for number in range(NODES)]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(store, folder / store.name)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster()
    try:
        nodes = [start_node(cluster, folder) for folder in folders]
        spread = [*command, "--knn-engine", "ray", "--knn-ray-address", cluster.address]
        results["three nodes"] = score(spread)
        results["one of them killed"] = score(spread, lambda: cluster.remove_node(nodes[-1], allow_graceful=False))
    finally:
        cluster.shutdown()
        shutil.rmtree(args.demo / "nodes")
    print(f"\n{'test split':<22} {'perplexity':>11} {'loss (base 2)':>14}")
    for name, (perplexity, loss) in results.items():
        print(f"{name:<22} {perplexity:>11} {loss:>14}")
    if len(set(results.values())) > 1:
        sys.exit("error: the perplexities differ")


def start_node(cluster: Cluster, copies: Path) -> object:
    """A node that finds its copy of the datastore in its own folder."""
    copies = str(copies.resolve())
    return cluster.add_node(num_cpus=1, object_store_memory=200 << 20, env_vars={"KNNLM_COPIES": copies})


def score(command: list, disturb: object = None) -> tuple[str, str]:
    """Perplexity and loss as fairseq-eval-lm prints them; ``disturb`` is called once all actors are at work."""
    words = [str(word) for word in command]
    print("$ " + " ".join(words).replace(f"{REPOSITORY}/", "").replace(sys.executable, "python"), flush=True)
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in child.stdout:
        lines.append(line)
        if disturb is not None and SERVED in line:
            print("killing a node", flush=True)
            threading.Thread(target=disturb).start()
    output = "".join(lines)
    if child.wait():
        sys.exit(f"error: the command failed\n{output[-2000:]}")
    if disturb is not None and LOST not in output:
        sys.exit("error: the split was scored before the node was lost, so nothing is shown; score a longer one")
    for line in lines:
        if SERVED in line or LOST in line:
            print(line.strip())
    return re.search(r"Perplexity: ([\d.]+)", output)[1], re.search(r"Loss \(base 2\): ([\d.]+)", output)[1]


if __name__ == "__main__":
    main()
