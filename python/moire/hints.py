"""What public functions are annotated with. Evaluated on any Python since 3.9, with or without
Torch, without which its types are Any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Union

import numpy as np

from .dtypes import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as TorchDevice
    from torch import dtype as TorchDtype
elif torch is None:
    Tensor = TorchDevice = TorchDtype = Any
else:
    Tensor, TorchDevice, TorchDtype = torch.Tensor, torch.device, torch.dtype

# All arrays of a call are of one kind. Of a call with nothing but GroupedTensors, which do not say
# theirs, type checkers take the first.
Array = TypeVar("Array", Tensor, np.ndarray)
AnyArray = Union[np.ndarray, Tensor]
Integers = Union[Sequence[int], np.ndarray, Tensor]
Device = Union[TorchDevice, str, int]
Dtype = Union[TorchDtype, np.dtype, type]
