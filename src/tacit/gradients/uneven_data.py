"""Counts backward passes, so that uneven data is an error and no hang."""

from __future__ import annotations

from tacit.errors import AttachError
from tacit.failure.barrier import StepsReached
from tacit.gradients.ddp_hook import Answer, BucketFuture
from tacit.model.trained_model import TrainedModel
from tacit.torch_compat import GradBucket, in_join, sequence_number


class SyncedBackwards:
    """Counts the backward passes in which DDP synchronises.

    Attributes:
        begun: how many there were; `since`, since the last step, or since one was discarded.
    """

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        self.begun = self.since = 0

    def around(self, answer: Answer) -> Answer:
        """The same answer to DDP's hook, counted."""

        def counted(bucket: GradBucket) -> BucketFuture:
            if bucket.index() == 0:
                refuse_join(self._model)
                self.begun += 1
                self.since += 1
            return answer(bucket)

        return counted

    def stepped(self) -> None:
        """To be called behind every step, and every one that is discarded."""
        self.since = 0


def refuse_join(model: TrainedModel) -> None:
    """Refuse torch's `Join`: a rank that is done would call our hook outside of backward, and take no steps.

    Raises:
        AttachError: the model is in such a context, or is still set up as it was in one.
    """
    if in_join(model):
        raise AttachError(
            "torch's Join context (model.join()) is at work on this model, and only plain 'ddp' can work "
            "with it: give every rank the same number of batches (DistributedSampler(..., drop_last=True)), "
            "or attach 'ddp'. After such a context, write Join([model], enable=False): torch leaves it on"
        )


def untouched(model: TrainedModel, steps: int) -> StepsReached:
    """How far a rank is where DDP exchanges gradients itself, by the number of collectives on its group."""
    if in_join(model):
        return StepsReached(0)  # there ranks may take different numbers of steps
    return StepsReached(steps, sequence_number(model.process_group))
