"""A checkpoint in the original key layout as a GGUF for llama.cpp (`deepseek4`), made by llama.cpp's own converter.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xzf llama_cpp_python-0.3.36.tar.gz
    python benchmarks/peers_gguf.py --llama_cpp llama_cpp_python-0.3.36/vendor/llama.cpp \
        --checkpoint_dir models/v4-nano --outfile v4-nano-bf16.gguf --linears BF16 --experts BF16

The converter wants experts in FP4 and llama.cpp an indexer of 128 channels per head. Experts are therefore written here, in any GGUF type
with blocks of 32 or without, and smaller indexer heads get zero channels before their own. That changes no selection: zeros add nothing
to a product, rotary channels stay the last ones, and a norm over more channels scales every key by one factor that the order of the
scores does not see: with F32 for both types and llama.cpp's cache in F32, logits of v4-nano are transformers' to 2.5e-5 over 2,230 tokens.
With llama.cpp's usual F16 cache or smaller types they differ: see `same text` of `peers.py`, which gives token ids, so that the vocabulary
is left out. Needs torch, transformers and safetensors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD = 128  # channels of an indexer head in llama.cpp
TYPES = ("F32", "F16", "BF16", "Q8_0", "MXFP4")


def pad_heads(tensor: Any, heads: int, dim: int = 0) -> Any:
    """`heads` blocks along `dim`, each with zeros before its channels so that it has HEAD of them."""
    import torch

    blocks = tensor.float().chunk(heads, dim)
    shape = list(blocks[0].shape)
    shape[dim] = HEAD - shape[dim]
    return torch.cat([torch.cat([torch.zeros(shape), b], dim) for b in blocks], dim).to(tensor.dtype)


def converter(llama_cpp: Path, linears: str, experts: str) -> type:
    """llama.cpp's converter with padded indexer heads, experts and linears in the types asked for, and no vocabulary."""
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    import gguf
    import torch
    from conversion.deepseek import DeepseekV4Model

    kinds = gguf.GGMLQuantizationType

    class Converter(DeepseekV4Model):
        model_arch = gguf.MODEL_ARCH.DEEPSEEK4

        def set_vocab(self) -> None:
            self._set_vocab_none()
            self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

        def set_gguf_parameters(self) -> None:
            self.hparams["index_head_dim"] = HEAD
            super().set_gguf_parameters()

        def modify_tensors(self, data_torch: Any, name: str, bid: int | None) -> Iterable[tuple[str, Any]]:
            if name.endswith("indexer.wq_b.weight"):
                data_torch = pad_heads(data_torch, self.hparams["index_n_heads"])
            elif ".indexer.compressor." in name:
                single, last = name.endswith("norm.weight"), data_torch.ndim - 1
                data_torch = pad_heads(data_torch, 1 if single else 2, last if name.endswith("ape") else 0)
            return super().modify_tensors(data_torch, name, bid)

        def tensor_force_quant(self, name: str, new_name: str, bid: int | None, n_dims: int) -> Any:
            if name.endswith(".ffn.gate.weight"):
                return kinds.F32  # a router's near ties do not survive activations rounded to a smaller type
            kind = super().tensor_force_quant(name, new_name, bid, n_dims)
            return kinds[linears] if kind == kinds.BF16 else kind

        def _write_mxfp4_expert_tensor(self, bid: int, proj: str, tensor_key: Any) -> list[str]:
            names = [f"layers.{bid}.ffn.experts.{e}.{proj}.weight" for e in range(self.hparams["n_routed_experts"])]
            tensors = [self.model_tensors[name]() for name in names]
            data = gguf.quants.quantize(torch.stack(tensors).float().numpy(), kinds[experts])
            self.gguf_writer.add_tensor(self.format_tensor_name(tensor_key, bid), data, raw_dtype=kinds[experts])
            return names

    return Converter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama_cpp", type=Path, required=True, help="source tree of llama.cpp, with its converter")
    parser.add_argument("--checkpoint_dir", type=Path, required=True)
    parser.add_argument("--outfile", type=Path, required=True)
    parser.add_argument(
        "--linears", choices=TYPES, default="BF16", help="embedding, linears and head; the router is in F32"
    )
    parser.add_argument("--experts", choices=TYPES, default="BF16", help="routed experts")
    args = parser.parse_args()
    model_class = converter(args.llama_cpp.resolve(), args.linears, args.experts)
    import gguf
    import torch

    with torch.inference_mode():
        kind = gguf.LlamaFileType.MOSTLY_BF16
        model_class(args.checkpoint_dir, kind, args.outfile, eager=True, model_name=args.outfile.stem).write()


if __name__ == "__main__":
    main()
