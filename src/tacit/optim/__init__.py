"""Large batches, which need fewer rounds: learning rates, batches that grow, and optimizers by layer."""

from tacit.optim.batches import GrowingBatches
from tacit.optim.lamb import LAMB
from tacit.optim.lars import LARS
from tacit.optim.scaling import scale_lr

__all__ = ["LAMB", "LARS", "GrowingBatches", "scale_lr"]
