"""Linear layers with their weights packed once for oneDNN's matrix products on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN of this torch packs weights of this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class PackedLinear(nn.Module):
    """y = x W^T + b, x [..., in] and W [out, in] in one dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self.bias = None if bias is None else nn.Parameter(bias.detach().contiguous(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
