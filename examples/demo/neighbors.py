"""Shows test contexts with their nearest training contexts, the way Figure 6 of the kNN-LM paper does.

Entry i of a datastore is the i-th predicted token of the corpus, so the values before it are its context. Of all test
tokens a few are shown whose probability the neighbours raise most, under rules that keep them interesting: a word that
the context does not hold already, found in training contexts that are not mere copies of the test context.
"""

import argparse
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary
from sacremoses import MosesDetokenizer

from fairseq_knnlm.datastore import Datastore
from fairseq_knnlm.memory.probabilities import neighbor_log_weights, similarities
from fairseq_knnlm.search import ExactSearch

K = 1024
CONTEXT = 14  # tokens of a context that are compared and shown
WIDTH = 72  # characters of it
SEARCHED = 1500  # test tokens that are looked at; each costs a comparison with every training key
COPIED = 4  # a neighbour that shares this many last tokens with the test context is a copy


def read_lm_probabilities(log: Path, tokens: list[str]) -> np.ndarray:
    """p_LM of every test token, out of what ``fairseq-eval-lm --output-word-probs`` printed: (entries,)."""
    blocks = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        found = re.search(r"(?::|\| )(\d+) (.+ \[-?\d+\.\d+\])$", line)
        if found:
            blocks[int(found[1])] = [word.rsplit(" [", 1) for word in found[2].split("\t")]
    words = [word for number in sorted(blocks) for word in blocks[number]]
    if [word for word, _ in words] != tokens:
        raise SystemExit(f"{log} is not about these queries; delete demo/ and run the demo again")
    return np.exp([float(score.rstrip("]")) for _, score in words])


def candidates(tokens: list[str], lm: np.ndarray) -> np.ndarray:
    """Numbers of the test tokens to look at: words that the LM finds unlikely and that are new in their context."""
    numbers = [
        i
        for i in range(CONTEXT, len(tokens))
        if re.fullmatch(r"[a-z]{5,}", tokens[i]) and lm[i] < 0.2 and tokens[i] not in tokens[i - CONTEXT : i]
    ]
    step = max(1, -(-len(numbers) // SEARCHED))
    return np.array(numbers[::step])


def shared_ending(first: list[str], second: list[str]) -> int:
    """How many last tokens two contexts have in common."""
    count = 0
    while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
        count += 1
    return count


class Text:
    """The tokens of a split, and how they are shown."""

    _detokenizer = MosesDetokenizer("en")

    def __init__(self, datastore: Datastore, dictionary: Dictionary):
        self.tokens = [dictionary[value] for value in datastore.values]

    def context(self, entry: int) -> list[str]:
        """Tokens before an entry, not beyond the paragraph."""
        tokens = self.tokens[max(0, entry - CONTEXT) : entry]
        if "</s>" in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index("</s>") :]
        return tokens

    def show(self, entry: int) -> str:
        """The end of the context as ordinary text."""
        text = self._detokenizer.detokenize(self.context(entry), unescape=False)
        text = text.replace(" @-@ ", "-").replace(" _ ", "_")
        if len(text) > WIDTH:
            text = "... " + text[-(WIDTH - 4) :].split(" ", 1)[-1]
        return text.ljust(WIDTH)


def choose(test: Text, train: Text, numbers: np.ndarray, ids: np.ndarray, gain: np.ndarray) -> Iterator[int]:
    """Rows in the order of their gain, without copies of the test context and with each target once."""
    shown = set()
    for row in np.argsort(-gain, kind="stable"):
        entry = int(numbers[row])
        context = test.context(entry)
        nearest = [train.context(int(neighbor)) for neighbor in ids[row, :4]]
        copies = any(shared_ending(context, other) >= COPIED for other in nearest)
        varied = len({" ".join(other[-3:]) for other in nearest}) > 2
        readable = len(context) > 7 and min(map(len, nearest)) > 3 and "<unk>" not in context
        if readable and not copies and varied and test.tokens[entry] not in shown:
            shown.add(test.tokens[entry])
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description="show test contexts and their nearest training contexts")
    parser.add_argument("--datastore", required=True, help="datastore of the training split")
    parser.add_argument("--queries", required=True, help="datastore of the test split")
    parser.add_argument("--dictionary", required=True, help="dict.txt of the binarised data")
    parser.add_argument("--lm-log", required=True, type=Path, help="log of fairseq-eval-lm --output-word-probs")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--examples", type=int, default=4)
    parser.add_argument("--neighbors", type=int, default=4, help="training contexts per example")
    parser.add_argument("--output", required=True, type=Path, help="text file to write")
    args = parser.parse_args()

    dictionary = Dictionary.load(args.dictionary)
    datastore, queries = Datastore(args.datastore), Datastore(args.queries)
    train, test = Text(datastore, dictionary), Text(queries, dictionary)
    lm = read_lm_probabilities(args.lm_log, test.tokens)
    numbers = candidates(test.tokens, lm)

    distances, ids = ExactSearch(datastore, "l2").search(queries.gather_keys(numbers), K)  # (n, K)
    near = similarities(torch.from_numpy(distances), torch.from_numpy(ids), "l2")
    log_shares = neighbor_log_weights(near, 1 / args.temperature)
    shares = log_shares.exp().numpy()
    right = datastore.values[ids] == queries.values[numbers][:, None]
    knn = (shares * right).sum(axis=1)  # p_kNN of the target, (n,)

    lines = []
    rows = choose(test, train, numbers, ids, knn - lm[numbers])
    for row in itertools.islice(rows, args.examples):
        entry = int(numbers[row])
        lines += [
            f"{'test context':<{WIDTH}}    {'target':<14}   p_LM     p_kNN",
            f"{test.show(entry)}    {test.tokens[entry]:<14}  {lm[entry]:5.3f}  {knn[row]:8.3f}",
            f"  {'nearest training contexts':<{WIDTH}}  {'target':<14}  share  distance",
        ]
        for neighbor, distance, share in itertools.islice(zip(ids[row], distances[row], shares[row]), args.neighbors):
            lines.append(f"  {train.show(neighbor)}  {train.tokens[neighbor]:<14}  {share:5.3f}  {distance:8.1f}")
        lines.append("")
    args.output.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
