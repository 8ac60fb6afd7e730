"""Where weight gradients go: into fresh tensors that autograd returns, into `main_grad`, or later
(delayed).

The main_grad contract, per weight: the gradient is added to `param.main_grad` (FP32 or BF16;
`param.get_main_grad()` is asked for it where there is one), or overwrites it where
`param.overwrite_main_grad` is true; then `param.grad_added_to_main_grad` is set and autograd gets a
dummy of the parameter's shape, so that hooks fire: zeros where `param.zero_out_wgrad` is true,
undefined values elsewhere.
"""

import torch

from .errors import invalid
from .steps import Beta


class FreshGradients:
    """The default: new tensors of the weights' own dtype, each of them optional."""

    delayed = False

    @staticmethod
    def destination(like, weights, needs):
        """(tensors that the kernel writes or None, beta, what autograd returns for each weight);
        `weights` are their shapes and types, `like` is any tensor on their device.
        """
        if not any(needs):
            return None, Beta(), [None] * len(weights)
        written = [like.new_empty(shape, dtype=dtype) for shape, dtype in weights]
        return written, Beta(), [grad if need else None for grad, need in zip(written, needs)]


class ParameterGradients:
    """For the parameters of a module: main_grad where it accumulates into it; later if delayed."""

    def __init__(self, parameters, accumulate_into_main_grad, delayed):
        self.parameters = parameters  # a function, so that replaced parameters are found
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.delayed = delayed
        self._waiting = []

    def destination(self, like, weights, needs):
        if not self.accumulate_into_main_grad:
            return FreshGradients.destination(like, weights, needs)
        if not any(needs):
            return None, Beta(), [None] * len(needs)
        parameters = self.parameters()
        written = [
            _main_grad(p) if need else torch.empty_like(p) for p, need in zip(parameters, needs)
        ]
        beta = _beta(
            [
                need and not getattr(p, "overwrite_main_grad", False)
                for p, need in zip(parameters, needs)
            ],
            parameters[0].device,
        )
        returned = [_dummy(p) if need else None for p, need in zip(parameters, needs)]
        for p, need in zip(parameters, needs):
            if need:
                p.grad_added_to_main_grad = True
        return written, beta, returned

    def defer(self, run, needs):
        """Keeps run(written, beta) for backward_dw()."""
        if any(needs):
            self._waiting.append((run, needs))

    def run_deferred(self):
        """Runs what backward passes left, oldest first; without main_grad the results go to
        param.grad.
        """
        waiting, self._waiting = self._waiting, []
        for run, needs in waiting:
            parameters = self.parameters()
            if self.accumulate_into_main_grad:
                written, beta, _ = self.destination(None, parameters, needs)
                run(written, beta)
                continue
            written = [p.new_empty(p.shape) for p in parameters]
            run(written, Beta())
            for p, grad, need in zip(parameters, written, needs):
                if need:
                    p.grad = grad if p.grad is None else p.grad + grad


def _main_grad(parameter):
    get = getattr(parameter, "get_main_grad", None)
    grad = get() if get is not None else getattr(parameter, "main_grad", None)
    if grad is None:
        raise invalid(
            "main_grad: accumulation into main_grad is on, but the parameter has neither "
            "main_grad nor "
            "get_main_grad(); give it a buffer or build the layer with "
            "accumulate_into_main_grad=False"
        )
    if grad.numel() != parameter.numel() or not grad.is_contiguous():
        raise invalid(
            f"main_grad: the buffer is {list(grad.shape)} with strides {list(grad.stride())}, "
            f"must be contiguous and "
            f"hold the {list(parameter.shape)} of its parameter"
        )
    return grad.view(parameter.shape)


def _beta(accumulates, device):
    if len(set(accumulates)) == 1:
        return Beta(int(accumulates[0]))
    return Beta(per_group=torch.tensor(accumulates, dtype=torch.uint8, device=device))


def _dummy(parameter):
    zero = getattr(parameter, "zero_out_wgrad", False)
    return torch.zeros_like(parameter) if zero else torch.empty_like(parameter)
