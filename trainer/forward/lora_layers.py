"""LoRA layers whose plain case is one function: the update goes into the base layer's output and gradient in place.

    y = W x + s B A x          (LoRA, arXiv 2106.09685, equation 3)

peft writes every term apart: seven passes over the output in memory in the place of three, for the same products.
"""

from typing import Any

import torch
from peft import tuners
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _AdaptedProduct(torch.autograd.Function):
    """y = x W^T + b + s (x A^T) B^T of rows x (T, in), with W (out, in), A (r, in), B (out, r); W and b are frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        low = x @ a.T  # (T, r)
        ctx.save_for_backward(x, low, weight, a, b)
        ctx.scale = scale
        return nn.functional.linear(x, weight, bias).addmm_(low, b.T, alpha=scale)  # (T, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low, weight, a, b = ctx.saved_tensors
        wants_x, _, _, wants_a, wants_b, _ = ctx.needs_input_grad
        grad_low = (grad @ b).mul_(ctx.scale)  # (T, r)
        grad_x = (grad @ weight).addmm_(grad_low, a) if wants_x else None
        grad_b = (grad.T @ low).mul_(ctx.scale) if wants_b else None
        return grad_x, None, None, grad_low.T @ x if wants_a else None, grad_b, None


class LoraLinear(tuners.lora.Linear):
    """peft's LoRA layer, which it stays for everything but the plain case of its forward pass."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapter = None if args or kwargs else self._plain_adapter()
        if adapter is None:
            return super().forward(x, *args, **kwargs)
        base: Any = self.base_layer
        tensors = [x, base.weight, base.bias, self.lora_A[adapter].weight, self.lora_B[adapter].weight]
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            tensors = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
        elif any(tensor is not None and tensor.dtype != x.dtype for tensor in tensors):
            return super().forward(x)
        rows = tensors[0].reshape(-1, x.shape[-1])  # (T, in)
        return _AdaptedProduct.apply(rows, *tensors[1:], self.scaling[adapter]).view(*x.shape[:-1], -1)

    def _plain_adapter(self) -> str | None:
        """Return the one active adapter where it is plain LoRA on a frozen linear layer, else None."""
        active, base = self.active_adapters, self.base_layer
        if self.disable_adapters or self.merged or len(active) != 1:
            return None
        name = active[0]
        if name not in self.lora_A or name in self.lora_variant or self.lora_bias[name]:
            return None
        if type(base) is not nn.Linear or base.weight.requires_grad:
            return None
        if base.bias is not None and base.bias.requires_grad:
            return None
        dropout = self.lora_dropout[name]
        return name if isinstance(dropout, nn.Identity) or dropout.p == 0 or not self.training else None


def use_adapted_products(model: nn.Module) -> None:
    """Make every plain LoRA layer of a model compute as one function; its weights, names and methods stay peft's."""
    for module in model.modules():
        if type(module) is tuners.lora.Linear:
            module.__class__ = LoraLinear
