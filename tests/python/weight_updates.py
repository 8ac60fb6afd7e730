"""Ways in which parameters come to other values."""

import torch


class WritesData(torch.optim.Optimizer):
    """As kernels of other libraries do, which Torch does not count."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad)


def updates(module):
    """Ways in which training loops change parameters."""
    weight = module._all("weight")[0]

    def optimizer(make):
        def step():
            for p in module.parameters():
                p.grad = torch.ones_like(p)
            make(module.parameters()).step()

        return step

    def load():
        module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})

    def replace():
        weight.data = weight.data + 1

    def from_masters(compiled=False):
        masters = [p.detach().clone() for p in module.parameters()]
        for master in masters:
            master.grad = torch.ones_like(master)
        step = torch.optim.SGD(masters, 0.1).step
        (torch.compile(step, backend="aot_eager") if compiled else step)()
        for p, master in zip(module.parameters(), masters):
            p.data.copy_(master)

    def in_place():
        with torch.no_grad():
            weight.mul_(2)

    return {
        "sgd": optimizer(lambda p: torch.optim.SGD(p, 0.1)),
        "adamw": optimizer(lambda p: torch.optim.AdamW(p, 0.1, fused=True)),
        "load_state_dict": load,
        "in_place": in_place,
        "data =": replace,
        "an optimizer through data": optimizer(WritesData),
        "an optimizer of masters": from_masters,
        "a compiled one": lambda: from_masters(compiled=True),
        "data.copy_, said": lambda: (weight.data.copy_(weight.data + 1), module.weights_changed()),
    }
