"""What the page shows of a text that SPALM reads: its gate, and the retrieved tokens with where they stood.

The fields are those of a kNN-LM (see numbers.js) with these meanings: ``lm`` is the network's own state alone (the gate
at 1), ``mix`` is SPALM, ``knn`` the share of the token among the retrieved ones, a neighbour's ``share`` its part of
m_t, and ``g`` one minus the mean of the gate: how much of z_t comes from the neighbours.
"""

from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor

from ..memory.contexts import Contexts
from ..memory.live_neighbors import Found, LiveNeighbors
from ..mixture.interpolation import perplexity
from ..mixture.output_layer import top_tokens
from ..mixture.scoring import lm_target_log_probs
from ..models.live_spalm import read_segments
from ..models.spalm_lm import SPALMDecoder
from .collect import CONTEXT, PREDICTIONS


class SPALMInspector:
    """Reads texts with a SPALM and the frozen LM that retrieves for it."""

    def __init__(self, decoder: SPALMDecoder, neighbors: LiveNeighbors, dictionary: Dictionary, segment: int):
        """segment: how many tokens SPALM reads at a time"""
        self.decoder, self.neighbors, self.dictionary, self.segment = decoder, neighbors, dictionary, segment
        self.contexts = Contexts(neighbors.datastore, dictionary)

    @torch.no_grad()
    def inspect(self, tokens: list[int], context: int = 0, **source: Any) -> dict[str, Any]:
        """Data for the page.

        Args:
            tokens: a text
            context: how many of its first tokens are read and not shown
            source: what the page's header says of the text and of the checkpoint
        """
        device = next(self.decoder.parameters()).device
        read = torch.tensor([self.dictionary.eos(), *tokens[:-1]], device=device)
        found = self.neighbors.of_text(read)
        states = read_segments(self.decoder, read[None], self.segment, everything=True)
        retrieved = torch.from_numpy(found.tokens)[None].to(device)
        memory, shares = self.decoder.read_neighbors(states, retrieved)
        gate = self.decoder.gate_values(states)
        mixed = (memory + gate * (states - memory))[0]  # as SPALMDecoder.mix, whose parts the page shows
        targets = torch.tensor(tokens, device=device)
        alone, spalm = (lm_target_log_probs(self.decoder, each, targets).double() for each in (states[0], mixed))
        return self._page(tokens, context, alone, spalm, gate[0].mean(dim=-1), shares[0], found, mixed, source)

    def _page(
        self, tokens: list[int], context: int, alone: Tensor, spalm: Tensor, gate: Tensor, shares: Tensor, found: Found,
        mixed: Tensor, source: dict[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        words: dict[int, int] = {}

        def word(token: int) -> int:
            return words.setdefault(int(token), len(words))

        def number(value: float | Tensor) -> float:
            return float(f"{float(value):.6g}")

        best = top_tokens([self.decoder], [mixed], min(PREDICTIONS, len(self.dictionary)))
        rows = []
        for place in range(context, len(tokens)):
            near: list[dict[str, Any]] = [
                {
                    "c": [word(token) for token in self.contexts.before(int(entry), CONTEXT)],
                    "w": word(int(token)),
                    "d": float(f"{distance:.7g}"),
                    "share": number(share),
                    "entry": int(entry),
                    "store": 0,
                }
                for token, entry, distance, share in zip(
                    found.tokens[place], found.ids[place], found.distances[place], shares[place].tolist()
                )
                if entry >= 0
            ]
            own = word(tokens[place])
            rows.append(
                {
                    "w": own,
                    "lm": number(alone[place].exp()),
                    "knn": number(sum(neighbor["share"] for neighbor in near if neighbor["w"] == own)),
                    "mix": number(spalm[place].exp()),
                    "top": [
                        [word(token), number(p)]
                        for token, p in zip(best.tokens[place].tolist(), best.probs[place].tolist())
                    ],
                    "near": near,
                    "g": [number(1 - gate[place])],
                }
            )
        store = {
            "name": Path(self.neighbors.datastore.folder).name, "entries": len(self.neighbors.datastore),
            "k": self.neighbors.k, "temperature": 1.0, "lambda": number(1 - gate[context:].mean()),
            **self.neighbors.search,
        }  # fmt: skip
        about = {
            "kind": "spalm",
            "lm": perplexity(alone[context:].mean().item()),
            "mix": perplexity(spalm[context:].mean().item()),
            "helped": float((spalm[context:] > alone[context:]).double().mean()),
            "stores": [store],
            "source": source,
        }
        end = self.dictionary.eos()
        shown = ["\u23ce" if token == end else self.dictionary[token] for token in words]
        return {"about": about, "words": shown, "tokens": rows}
