"""DeepSeek-V4 by transformers: the reference every exactness test compares with. Clear and slow, float32, one sequence.

The trunk is `DeepseekV4ForCausalLM`, run over the whole sequence without a cache. transformers has no V4 MTP, so it is
put together from transformers' parts (spec section 6). Rows: MTP row i takes (H_i, t_{i+1}) and predicts t_{i+2}.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.utils import logging

from .trees import path

LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention"}  # any other ratio is HCA
CSA_RATIO = 4


class TrunkRows(NamedTuple):
    """Result of a trunk forward over T tokens."""

    logits: np.ndarray  # float32 [T, V]
    streams: np.ndarray  # float32 [T, hc_mult, D], H: after the last layer, before hc_head


class MtpRows(NamedTuple):
    """Result of an MTP forward over T rows."""

    logits: np.ndarray  # float32 [T, V], row i predicts t_{i+2}
    streams: np.ndarray  # float32 [T, hc_mult, D], Y: after the block, before its hc_head


def tf_config(directory: Path | str) -> DeepseekV4Config:
    """transformers' config of a checkpoint directory, for any HCA ratio.

    Raises ValueError if the checkpoint has two different HCA ratios (transformers knows one per model).
    """
    raw: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text())
    ratios: list[int] = raw.pop("compress_ratios")[: raw["num_hidden_layers"]]
    hca = set(ratios) - set(LAYER_TYPES)
    if len(hca) > 1:
        raise ValueError(f"compress_ratios has the HCA ratios {sorted(hca)}; transformers can hold only one")
    config = DeepseekV4Config(
        **raw,
        layer_types=[LAYER_TYPES.get(ratio, "heavily_compressed_attention") for ratio in ratios],
        compress_rates={
            "compressed_sparse_attention": CSA_RATIO,
            "heavily_compressed_attention": hca.pop() if hca else 128,
        },
    )
    assert config.qk_rope_head_dim == raw["qk_rope_head_dim"], "head_dim and qk_rope_head_dim: float ratio not exact"
    return config


class Oracle:
    """Trunk and MTP of one checkpoint directory in the original key layout.

    mtp_file: a safetensors file whose `mtp.*` tensors replace those of model.safetensors (v4-nano has a second one).
    """

    def __init__(self, directory: Path | str, mtp_file: Path | str | None = None) -> None:
        torch.set_num_threads(1)  # the matrices are tiny: a second thread only costs
        self.config = tf_config(directory)
        tensors = load_file(Path(directory) / "model.safetensors")
        self._trunk = _load(self.config, {k: v for k, v in tensors.items() if not k.startswith("mtp.")})
        self._drafter = _Mtp(self.config, tensors | (load_file(mtp_file) if mtp_file else {}))
        self._seen_streams = torch.empty(0)
        self._trunk.model.hc_head.register_forward_pre_hook(self._keep_streams)

    def _keep_streams(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        self._seen_streams = inputs[0]

    @torch.no_grad()
    def _batch(self, rows: list[list[int]]) -> TrunkRows:
        """One forward over B sequences of equal length: [B, T, V] and [B, T, hc_mult, D]."""
        logits = self._trunk(input_ids=torch.tensor(rows), use_cache=False).logits
        return TrunkRows(logits.numpy(), self._seen_streams.numpy())

    def forward(self, ids: Sequence[int]) -> TrunkRows:
        """One fresh forward over all of `ids`."""
        logits, streams = self._batch([[int(i) for i in ids]])
        return TrunkRows(logits[0], streams[0])

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float32 [T, V]; row i predicts ids[i + 1]."""
        return self.forward(ids).logits

    def streams(self, ids: Sequence[int]) -> np.ndarray:
        """H, float32 [T, hc_mult, D]."""
        return self.forward(ids).streams

    def tree(self, prefix: Sequence[int], parents: Sequence[int], tokens: Sequence[int]) -> TrunkRows:
        """Trunk rows of all N tree nodes behind the committed `prefix`: each path as a plain sequence of its own.

        Node n has position len(prefix) + depth[n]; the root (index 0, parent -1) is the first token after the prefix.
        Paths run as one batch, filled up at the end with token 0, which no earlier row can see.
        """
        leaves = sorted(set(range(len(parents))) - {int(p) for p in parents})
        paths = [path(parents, leaf) for leaf in leaves]
        longest = max(map(len, paths))
        sequences = [[*prefix, *(tokens[n] for n in nodes), *[0] * (longest - len(nodes))] for nodes in paths]
        logits, streams = self._batch([[int(i) for i in sequence] for sequence in sequences])
        where = {n: (b, len(prefix) + depth) for b, nodes in enumerate(paths) for depth, n in enumerate(nodes)}
        batch, row = np.array([where[n] for n in range(len(parents))]).T
        return TrunkRows(logits[batch, row], streams[batch, row])

    def mtp(self, ids: Sequence[int], next_ids: Sequence[int]) -> MtpRows:
        """MTP rows 0..T-1 from true streams: row i = (H_i of `ids`, next_ids[i]); next_ids[i] is t_{i+1}."""
        assert len(ids) == len(next_ids), "one next token per row"
        return self._drafter.rows(torch.from_numpy(self.streams(ids)), _tensor(next_ids))

    def mtp_logits(self, ids: Sequence[int], next_ids: Sequence[int]) -> np.ndarray:
        """float32 [T, V]; see `mtp`."""
        return self.mtp(ids, next_ids).logits

    def mtp_chain(self, ids: Sequence[int], draft_tokens: Sequence[int]) -> MtpRows:
        """The k + 1 MTP rows of a draft path c_1..c_k behind the known tokens `ids` = t_0..t_P.

        Result row 0 is true row P-1 = (H_{P-1}, t_P) and predicts c_1; result row j is (Y of result row j-1, c_j) at
        position P-1+j, attends to the true rows 0..P-1 and its own chain, and predicts c_{j+1}.
        """
        last = len(ids) - 1
        assert last >= 1, "a chain starts from a true row: two known tokens at least"
        streams, following = torch.from_numpy(self.streams(ids[:last])), list(ids[1:])
        rows = self._drafter.rows(streams, _tensor(following))
        for token in draft_tokens:
            streams = torch.cat([streams, torch.from_numpy(rows.streams[-1:])])
            following.append(token)
            rows = self._drafter.rows(streams, _tensor(following))
        return MtpRows(rows.logits[last - 1 :], rows.streams[last - 1 :])

    def mtp_chain_logits(self, ids: Sequence[int], draft_tokens: Sequence[int]) -> np.ndarray:
        """float32 [k + 1, V]; see `mtp_chain`."""
        return self.mtp_chain(ids, draft_tokens).logits


class _Mtp:
    """The MTP block as a one-layer transformers model (same key names), plus the two projections and two norms."""

    def __init__(self, trunk: DeepseekV4Config, tensors: dict[str, torch.Tensor]) -> None:
        own = {k.removeprefix("mtp.0."): v for k, v in tensors.items() if k.startswith("mtp.0.")}
        entry = {n: own.pop(f"{n}.weight").float() for n in ("enorm", "hnorm", "e_proj", "h_proj")}
        outer = ("norm.", "hc_head_")
        keys = {k if k.startswith(outer) else f"layers.0.{k}": v for k, v in own.items()}
        shared = {k: tensors[k] for k in ("embed.weight", "head.weight")}
        self._net = _load(_one_sliding_layer(trunk), keys | shared)
        self._enorm, self._hnorm = entry["enorm"], entry["hnorm"]
        self._e_proj, self._h_proj = entry["e_proj"], entry["h_proj"]
        self._eps: float = trunk.rms_norm_eps
        self._window: int = trunk.sliding_window

    @torch.no_grad()
    def rows(self, streams: torch.Tensor, next_ids: torch.Tensor) -> MtpRows:
        """streams [T, hc_mult, D], next_ids [T]: row i sits at position i."""
        model = self._net.model
        embedded = self._rms(model.embed_tokens(next_ids), self._enorm) @ self._e_proj.T
        x = self._rms(streams, self._hnorm) @ self._h_proj.T + embedded[:, None]
        positions = torch.arange(len(next_ids))[None]
        y = model.layers[0](
            x[None],
            position_embeddings={"main": model.rotary_emb(x, position_ids=positions, layer_type="main")},
            position_ids=positions,
            attention_mask=self._mask(positions[0]),
            input_ids=next_ids[None],
        )
        logits = self._net.lm_head(model.norm(model.hc_head(y)))
        return MtpRows(logits[0].numpy(), y[0].numpy())

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * weight

    def _mask(self, positions: torch.Tensor) -> torch.Tensor:
        """Additive [1, 1, T, T]: each row sees itself and the window - 1 rows before it."""
        back = positions[:, None] - positions[None, :]
        allowed = (back >= 0) & (back < self._window)
        return torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))[None, None]


def _one_sliding_layer(trunk: DeepseekV4Config) -> DeepseekV4Config:
    fields = trunk.to_dict() | {
        "num_hidden_layers": 1,
        "layer_types": ["sliding_attention"],
        "mlp_layer_types": ["moe"],
    }
    return DeepseekV4Config(**fields)


def _load(config: DeepseekV4Config, tensors: dict[str, torch.Tensor]) -> DeepseekV4ForCausalLM:
    """A float32 model from tensors under original keys. Raises ValueError unless keys and shapes fit exactly."""
    logging.disable_progress_bar()
    model, info = DeepseekV4ForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        raise ValueError(f"checkpoint does not fit transformers' DeepSeek-V4: {wrong}")
    return model.eval()


def _tensor(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor([int(i) for i in ids], dtype=torch.int64)
