"""What the fork server of `ranks` imports, so that ranks need not; kept out of their garbage collections, which would
copy it page by page."""

import gc

import pytest  # noqa: F401
import torch._dynamo  # the first optimizer of a process imports it
import torch.distributed  # noqa: F401

import antiphon.train.trainer  # noqa: F401

gc.freeze()
