"""The neural editor of He et al. (2020): a sentence is an edit of a prototype, and few prototypes are enough.

    theta ~ Dir(alpha)      which prototypes there are        q(theta) = Dir(lambda), prototypes/dirichlet.py
    t ~ Cat(theta)          the prototype of a sentence       q(t|x) = softmax(e_t^T W e_x), prototypes/retriever.py
    z ~ uniform on sphere   the edit                          q(z|t, x) = vMF(mu(t, x), kappa), prototypes/vmf.py
    x ~ p(x|t, z)           the sentence                      models/editor_networks.py
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import BaseFairseqModel, register_model, register_model_architecture
from omegaconf import II
from torch import Tensor, nn

from ..errors import KnnlmError
from ..prototypes.dirichlet import PrototypePrior
from ..prototypes.retriever import SPREAD, Retriever
from ..prototypes.vmf import EditVectors
from .editor_networks import EditEncoder, LSTMEditor, TransformerEditor

if TYPE_CHECKING:
    PRIORS = str  # a class that is made when the program runs is no type
    EDITORS = str
else:
    PRIORS = ChoiceEnum(["sparse", "uniform", "none"])
    EDITORS = ChoiceEnum(["lstm", "transformer"])


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass
class SparseEditorConfig(FairseqDataclass):
    prototype_prior: PRIORS = field(
        default="sparse",
        metadata=_help(
            "sparse: a Dirichlet that is learnt; uniform: the dense editor; none: the same decoder without prototypes"
        ),
    )
    prototype_alpha: float = field(
        default=0.1, metadata=_help("concentration of the Dirichlet prior; below 1 is sparse, the less the sparser")
    )
    retriever_spread: float = field(
        default=SPREAD, metadata=_help("over how many prototypes q(t|x) is spread before training")
    )
    retriever_gain: float = field(
        default=4.0, metadata=_help("how much faster the retriever's W learns than the rest of the model")
    )
    edit_dim: int = field(default=50, metadata=_help("dimensions of the edit vector z"))
    edit_kappa: float = field(default=30.0, metadata=_help("concentration of q(z|t, x); its KL is constant"))
    edit_hidden_dim: int = field(default=64, metadata=_help("of the BiLSTM over the edit script, each direction"))
    editor: EDITORS = field(default="lstm", metadata=_help("the network p(x|t, z)"))
    editor_layers: int = field(default=1, metadata=_help("layers of the editor"))
    editor_heads: int = field(default=4, metadata=_help("attention heads of the Transformer editor"))
    embed_dim: int = field(default=128, metadata=_help("dimensions of words, of which there is one table for all"))
    hidden_dim: int = field(default=256, metadata=_help("dimensions of the editor's states; an even number"))
    dropout: float = field(default=0.2, metadata=_help("on words and states of the editor"))
    copy_words: bool = field(default=False, metadata=_help("the editor may copy words of the prototype"))
    longest_text: int = II("task.longest_sentence")


class EditorOutput(NamedTuple):
    """What the criterion needs of B sentences and n prototypes for each."""

    log_likelihood: Tensor  # (B, n) log p(x|t, z)
    log_q: Tensor | None  # (B, K) log q(t|x); None: the model has no prototypes
    chosen: Tensor | None  # (B, n) the prototypes


@register_model("sparse_editor", dataclass=SparseEditorConfig)
class SparseEditor(BaseFairseqModel):
    """Retriever, edit encoder, editor, and the prior over prototypes."""

    prototype_tokens: Tensor  # (K, S); both belong to the data, not to the checkpoint
    prototype_embeddings: Tensor  # (K, d)

    def __init__(self, cfg: SparseEditorConfig, dictionary: Any, prototypes: Tensor | None, embeddings: Tensor | None):
        super().__init__()
        self.cfg, self.pad, self.eos = cfg, dictionary.pad(), dictionary.eos()
        self.num_updates = 0
        if cfg.hidden_dim < 2 or cfg.hidden_dim % 2 or cfg.embed_dim < 1 or cfg.editor_layers < 1:
            raise KnnlmError("--hidden-dim must be even, and --embed-dim and --editor-layers 1 or more")
        embed = nn.Embedding(len(dictionary), cfg.embed_dim, self.pad)
        nn.init.normal_(embed.weight, std=cfg.embed_dim**-0.5)
        nn.init.zeros_(embed.weight[self.pad])
        kind = LSTMEditor if str(cfg.editor) == "lstm" else TransformerEditor
        self.editor = kind(embed, cfg, prototypes is not None)
        self.prior: PrototypePrior | None = None
        if prototypes is None or embeddings is None:
            return
        if len(prototypes) < 2:
            raise KnnlmError("a sentence must not retrieve itself, and there is no other; give more sentences")
        self.edits = EditVectors(cfg.edit_dim, cfg.edit_kappa)
        self.edit_encoder = EditEncoder(embed, cfg.edit_hidden_dim, cfg.edit_dim)
        self.register_buffer("prototype_tokens", prototypes, persistent=False)
        self.register_buffer("prototype_embeddings", embeddings, persistent=False)
        self.retriever = Retriever(embeddings.size(1), cfg.retriever_gain)
        self.retriever.rescale(embeddings, cfg.retriever_spread)
        alpha = cfg.prototype_alpha if str(cfg.prototype_prior) == "sparse" else None
        self.prior = PrototypePrior(len(prototypes), len(prototypes), alpha)

    @classmethod
    def build_model(cls, cfg: SparseEditorConfig, task: Any) -> "SparseEditor":
        if not hasattr(task, "open_prototypes"):
            raise KnnlmError("--arch sparse_editor needs --task sparse_prototypes, which reads the prototypes")
        if str(cfg.prototype_prior) == "none":
            return cls(cfg, task.dictionary, None, None)
        prototypes, embeddings = task.open_prototypes()
        return cls(cfg, task.dictionary, prototypes, embeddings)

    def set_num_updates(self, num_updates: int) -> None:
        super().set_num_updates(num_updates)
        self.num_updates = num_updates

    def max_positions(self) -> int:
        return int(self.cfg.longest_text)

    def forward(
        self, sentences: Tensor, embeddings: Tensor | None = None, own: Tensor | None = None, samples: int = 1
    ) -> EditorOutput:
        """Choose ``samples`` prototypes and an edit vector for each sentence, and score the sentence.

        Args:
            sentences: (B, T) padded, ends included
            embeddings: (B, d) of the sentences
            own: (B,) the prototypes that are the sentences themselves, -1 for none
        """
        if self.prior is None or embeddings is None:
            return EditorOutput(self.editor.log_likelihood(sentences, None, None, self.eos)[:, None], None, None)
        log_q = self.retriever(embeddings, self.prototype_embeddings, own)
        chosen = torch.multinomial(log_q.detach().exp(), samples, replacement=True)
        repeated = sentences.repeat_interleave(samples, dim=0)  # (B * n, T)
        prototypes = self.trimmed(self.prototype_tokens[chosen.flatten()])
        edits = self.edits.sample(self.edit_encoder(prototypes, repeated))
        scores = self.editor.log_likelihood(repeated, self.editor.read(prototypes), edits, self.eos)
        return EditorOutput(scores.view(-1, samples), log_q, chosen)

    def trimmed(self, tokens: Tensor) -> Tensor:
        """Rows (n, S) without columns that are all padding."""
        width = int((tokens != self.pad).sum(dim=1).max())
        return tokens[:, :width]


@register_model_architecture("sparse_editor", "sparse_editor_transformer")
def sparse_editor_transformer(args: Any) -> None:
    """A small Transformer as the editor."""
    args.editor = getattr(args, "editor", "transformer")
    args.editor_layers = getattr(args, "editor_layers", 2)
