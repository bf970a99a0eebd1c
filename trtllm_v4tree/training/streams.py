"""Hyper-connections (spec section 5.1): the four residual streams of a token are read, mixed and written here.

Everything is float32. N tokens, m streams, D channels; the small matrices keep the tokens last, so that they vectorise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtllm_v4tree.training.fusion import fusible

_OWN_STREAM, _OTHER_STREAM = 1.5, -1.5
_STAY = 4.0


class StreamRules(NamedTuple):
    """The constants of one model's hyper-connections."""

    norm_eps: float
    hc_eps: float
    iterations: int


class SiteWeights(NamedTuple):
    """How one site reads and writes: `fn` [(2 + m) m, m D], `base` [(2 + m) m], `scale` [3]."""

    fn: Tensor
    base: Tensor
    scale: Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., D] over its root mean square, times `weight` [D]."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


@fusible
def read_streams(x: Tensor, site: SiteWeights, norm: Tensor, rules: StreamRules) -> tuple[Tensor, Tensor, Tensor]:
    """Streams [N, m, D] -> normed input of the sublayer [N, D], `post` [m, N] and `comb` [m from, m to, N]."""
    m = x.shape[1]
    mix = _mix(x, site.fn, rules.norm_eps)
    pre = torch.sigmoid(mix[:m] * site.scale[0] + site.base[:m, None]) + rules.hc_eps
    post = 2 * torch.sigmoid(mix[m : 2 * m] * site.scale[1] + site.base[m : 2 * m, None])
    comb = (mix[2 * m :] * site.scale[2] + site.base[2 * m :, None]).view(m, m, -1)
    return rms_norm(_weighted(x, pre), norm, rules.norm_eps), post, sinkhorn(comb, rules)


@fusible
def write_streams(x: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams [N, m, D]: stream k is post[k] * out + sum_j comb[j, k] * x[j]."""
    m = x.shape[1]
    out = out.float()
    rows = [sum((comb[j, k, :, None] * x[:, j] for j in range(m)), start=post[k, :, None] * out) for k in range(m)]
    return torch.stack(rows, 1)


@fusible
def merge_streams(x: Tensor, site: SiteWeights, norm: Tensor, rules: StreamRules) -> Tensor:
    """Streams [N, m, D] -> normed input of the output head [N, D] (spec section 5.3)."""
    pre = torch.sigmoid(_mix(x, site.fn, rules.norm_eps) * site.scale + site.base[:, None]) + rules.hc_eps
    return rms_norm(_weighted(x, pre), norm, rules.norm_eps)


def sinkhorn(logits: Tensor, rules: StreamRules) -> Tensor:
    """[m from, m to, N] -> nearly doubly stochastic matrices, by alternating column and row sums."""
    eps = rules.hc_eps
    comb = logits.softmax(1) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(rules.iterations - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return comb


def new_site(parent: nn.Module, name: str, m: int, hidden: int, own: int) -> None:
    """Registers `{name}_fn/_base/_scale` of a sublayer that starts out reading stream `own` and leaving streams alone."""
    base = torch.cat([torch.full((m,), _OTHER_STREAM), torch.zeros(m), _STAY * torch.eye(m).flatten()])
    base[own % m] = _OWN_STREAM
    _register(parent, name, base, m, hidden, scales=3)


def new_head_site(parent: nn.Module, name: str, m: int, hidden: int) -> None:
    """Registers `{name}_fn/_base/_scale` of an output head that starts out adding all streams up."""
    _register(parent, name, torch.zeros(m), m, hidden, scales=1)


def site_of(parent: nn.Module, name: str) -> SiteWeights:
    """The registered weights of one site."""
    return SiteWeights(*(parent.get_parameter(f"{name}_{part}") for part in SiteWeights._fields))


def _register(parent: nn.Module, name: str, base: Tensor, m: int, hidden: int, scales: int) -> None:
    fn = torch.randn(len(base), m * hidden) * (m * hidden) ** -0.5
    for part, value in (("fn", fn), ("base", base), ("scale", torch.full((scales,), 0.1))):
        parent.register_parameter(f"{name}_{part}", nn.Parameter(value))


def _mix(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    """fn times the normed flat streams of x [N, m, D]: [rows of fn, N]."""
    flat = x.flatten(1)
    return (fn @ flat.T) * torch.rsqrt(flat.square().mean(-1) + eps)


def _weighted(x: Tensor, weights: Tensor) -> Tensor:
    """sum_j weights[j, n] * x[n, j]: [N, D]."""
    return sum((weights[j, :, None] * x[:, j] for j in range(1, x.shape[1])), start=weights[0, :, None] * x[:, 0])
