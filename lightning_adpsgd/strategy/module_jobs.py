"""The jobs of a Fabric program: one for each module that it trains.

Fabric has no hook for the end of training. A program therefore ends its jobs with
`finish`, or by returning if a launcher runs it. Otherwise they end with an error when
its process exits.
"""

import atexit
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_adpsgd.mixing.consensus import Consensus
from lightning_adpsgd.strategy.job import Job
from lightning_adpsgd.strategy.optimizer_reset import InitialState

_UNFINISHED = (
    "the program ended without `fabric.strategy.finish()`, so that its weights may "
    "differ from those of the other learners; call it after the last step, or give "
    "your program to `fabric.launch` as a function"
)


class TrainingUnfinished(RuntimeError):
    """A learner's program ended while its modules were still being trained."""


@final
class ModuleJobs:
    """The jobs of a program's modules, and the optimizers that change their weights."""

    def __init__(self) -> None:
        self._jobs: dict[nn.Module, Job] = {}
        self._initial_states: dict[Optimizer, InitialState] = {}

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    @property
    def running(self) -> list[Job]:
        """The jobs that communicate at present."""
        return [job for job in self if job.running]

    def add(self, module: nn.Module, job: Job) -> None:
        """Adds a module and its job, which is not started yet."""
        # Runs before the handler of torch, which was registered before it and takes
        # the connections away.
        atexit.register(self._end_unfinished)
        self._jobs[module] = job

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Starts the jobs of the modules whose weights an optimizer changes."""
        self._initial_states[optimizer] = InitialState(optimizer)
        for job in self.of_optimizer(optimizer):
            if not job.running:
                job.start()

    def of_module(self, module: nn.Module) -> Job | None:
        """The job of a module, or of the module that DDP has wrapped."""
        wrapped = isinstance(module, DistributedDataParallel)
        return self._jobs.get(module.module if wrapped else module)

    def of_optimizer(self, optimizer: Optimizer) -> list[Job]:
        """The jobs of the modules whose weights an optimizer changes."""
        weights = {id(w) for group in optimizer.param_groups for w in group["params"]}
        return [
            job
            for module, job in self._jobs.items()
            if any(id(weight) in weights for weight in module.parameters())
        ]

    def optimizers_of(self, job: Job) -> list[Optimizer]:
        """The optimizers that change the weights of a job's module."""
        return [one for one in self._initial_states if job in self.of_optimizer(one)]

    def reset_optimizers(self, module: nn.Module) -> None:
        """Resets the optimizers of a module to their initial state."""
        for optimizer in self.optimizers_of(self._jobs[module]):
            self._initial_states[optimizer].restore()

    def meet(self, name: str) -> None:
        """Waits for all learners before a collective."""
        for job in self.running[:1]:
            job.meet_if_asynchronous(name)

    # --- the end

    def run(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a program in all learners; training ends when it returns."""
        if self.running:  # a launch within a launch
            return program(*args, **kwargs)
        try:
            with self._named():
                output = program(*args, **kwargs)
            self.finish()
        except BaseException as exception:
            self._fail(exception)
            raise
        return output

    def finish(self) -> list[Consensus]:
        """Ends training in the consensus model; returns the consensus distances."""
        measured = [job.finish() for job in self.running]
        self.close()
        self.release()
        return [consensus for consensus in measured if consensus is not None]

    def close(self) -> None:
        """Releases all jobs without waiting for any learner."""
        atexit.unregister(self._end_unfinished)
        self._initial_states.clear()
        for job in self:
            job.close()

    def release(self) -> None:
        """Gives the weights of all modules storage of their own again."""
        for job in self:
            job.flat.release()

    def _fail(self, exception: BaseException) -> None:
        for job in self:
            job.fail(exception)
        self.close()

    def _end_unfinished(self) -> None:
        """Tells the others why this learner leaves, when its process exits."""
        if self.running:
            # Set by the interpreter when an exception has ended the program.
            cause = getattr(sys, "last_value", None)
            self._fail(cause or TrainingUnfinished(_UNFINISHED))
        self.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Names the failure that broke DDP inside a super-learner."""
        try:
            yield
        except RuntimeError:
            job = next(iter(self.running), None)
            if job is None or job.groups.gradients is None:
                raise
            with job.failures.named():
                raise
