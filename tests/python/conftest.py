"""Every test draws from a generator whose seed is printed with a failure."""

import os
import random

import pytest
import torch


@pytest.fixture
def seed(request):
    value = random.SystemRandom().randrange(2**31)
    print(f"seed {value} in {os.path.basename(request.node.nodeid)}")
    return value


@pytest.fixture
def generator(seed):
    return torch.Generator().manual_seed(seed)
