"""A tour of the Python API, cell by cell (``# %%``): run it whole, or step by step in an editor that knows cells.

    python examples/python/tour.py CHECKPOINT_FOLDER CHECKPOINT DATA DATASTORE

After ``make demo``: python examples/python/tour.py demo/checkpoints checkpoint_best.pt demo/bin demo/datastore
"""

# %% A checkpoint of fairseq with a datastore, loaded in the way that fairseq users know
import sys

import numpy as np

from fairseq_knnlm import KNNLM, Datastore, build_index, open_index
from fairseq_knnlm.search import ExactSearch, ListSearch

folder, checkpoint, data, store = sys.argv[1:5]
lm = KNNLM.from_pretrained(folder, checkpoint, data, datastore=store)

# %% Perplexity of a text, with and without the datastore; words stand between blanks
text = " ".join(lm.dictionary[token] for token in Datastore(store).values[:12])
scores = lm.score(text)
print(f"perplexity {scores.perplexity:.2f}, of the LM alone {scores.lm_perplexity:.2f}")
for token, of_lm, of_mixture in zip(scores.tokens, scores.lm_log_probs, scores.log_probs):
    print(f"{token:>12}  {np.exp(of_lm):.4f} -> {np.exp(of_mixture):.4f}")

# %% What was retrieved for the token that follows
for neighbor in lm.neighbors(text, count=3):
    print(f"{neighbor.share:6.1%}  ...{neighbor.context[-40:]} -> {neighbor.token}")

# %% A continuation, sampled from the mixture
print(lm.sample(text, tokens=10, seed=1))

# %% The parts without a model: a datastore is arrays, so keys of any other model can be searched
datastore = Datastore(store)  # entry i is the i-th token of the corpus
queries = datastore.gather_keys(np.array([5, 6, 7])).astype(np.float32)
distances, ids = ExactSearch(datastore, "l2").search(queries, k=4)
print(ids[:, 0], distances[:, 0])  # each key finds itself

# %% An index makes the same search fast; nprobe says how many of its inverted lists are visited
index = open_index(datastore, build_index(datastore, "IVF16,SQfp16", "l2", name="tour"))
distances, ids = ListSearch(index, datastore, "l2", nprobe=8).search(queries, k=4)
print(ids[:, 0], datastore.values[ids[:, 1]])
