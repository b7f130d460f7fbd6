"""The table and the plot of the scaling recipe, from its logs; and both as JSON."""

import json
import re
import sys
from pathlib import Path

from fairseq_knnlm.analysis.report import plot


def main() -> None:
    work, little, large = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    rows = []
    for fraction in sys.argv[4:]:
        log = (work / f"logs/tune-{fraction}.log").read_text()
        tuned = json.loads(re.search(r'^\{"flags".*$', log, re.MULTILINE)[0])
        entries = json.loads((work / f"datastore-{fraction}/manifest.json").read_text())["entries"]
        result = tuned["results"]["valid, report"]
        rows.append({"fraction": float(fraction), "entries": entries, "flags": tuned["flags"], **result})
    (work / "scaling.json").write_text(json.dumps({"little": little, "large": large, "rows": rows}, indent=1) + "\n")
    curves = {
        "LM of a part + datastore": [row["mixture"] for row in rows],
        "LM of a part": [little] * len(rows),
        "LM of everything": [large] * len(rows),
    }
    plot(work / "scaling.svg", [row["entries"] for row in rows], curves, "entries of the datastore", "perplexity")
    print(f"\n{'second half of valid':<34} {'entries':>12} {'ours':>9} {'paper':>9}")
    alone = (("LM trained on a part", little, "19.59"), ("LM trained on everything", large, "15.17"))
    for label, value, paper in alone:
        print(f"{label:<34} {'-':>12} {value:>9.2f} {paper:>9}")
    for row in rows:
        paper = "13.73" if row["fraction"] == 1 else "-"
        label = f"LM of a part + kNN, {row['fraction']:.0%}"
        print(f"{label:<34} {row['entries']:>12,} {row['mixture']:>9.2f} {paper:>9}")
    print(f"(The paper's are of its test set: 100M of 3B tokens of Wikipedia.) Plot: {work / 'scaling.svg'}")


if __name__ == "__main__":
    main()
