"""For large batches: learning rates, growing batches, and optimizers with a learning rate for each layer."""

from tacit.optim.adascale import AdaScale
from tacit.optim.batches import GrowingBatches
from tacit.optim.lamb import LAMB
from tacit.optim.lars import LARS
from tacit.optim.scaling import scale_lr

__all__ = ["LAMB", "LARS", "AdaScale", "GrowingBatches", "scale_lr"]
