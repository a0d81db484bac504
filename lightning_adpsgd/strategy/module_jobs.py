"""The jobs of a Fabric program: one for each module that it trains.

A program ends them with `finish`, or by returning if a launcher runs it. Otherwise they
end with an error when its process exits.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, final
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_adpsgd.coordination.failures import FailureReport
from lightning_adpsgd.mixing.consensus import Consensus
from lightning_adpsgd.strategy.compatibility import (
    check_optimizers,
    explain_unused_parameters,
)
from lightning_adpsgd.strategy.evaluation_watch import EvaluationWatch
from lightning_adpsgd.strategy.job import Job, together
from lightning_adpsgd.strategy.optimizer_reset import InitialState

_UNFINISHED = (
    "the program ended without `fabric.strategy.finish()`, so that its weights may "
    "differ from those of the other learners; call it after the last step, or give "
    "your program to `fabric.launch` as a function"
)


@final
class ModuleJobs:
    """The jobs of a program's modules, and the optimizers that change their weights.

    A trained module, and an optimizer, live no longer than the program uses them.

    Attributes:
        watches: watches of the modules in training, which end with it.
        outside: report of failures while no module is in training; None before the
            launch, and with a single learner.
    """

    outside: FailureReport | None = None

    def __init__(self) -> None:
        self._all: list[Job] = []
        self._jobs = WeakKeyDictionary[nn.Module, Job]()
        self._initial_states = WeakKeyDictionary[Optimizer, InitialState]()
        self.watches: list[EvaluationWatch] = []

    def __iter__(self) -> Iterator[Job]:
        return iter(self._all)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Has no jobs in another process."""
        return ModuleJobs, ()

    @property
    def running(self) -> list[Job]:
        """The jobs that communicate at present."""
        return [job for job in self if job.running]

    def set_up(self, module: nn.Module, make: Callable[[], Job]) -> Job:
        """Makes the job of a module; RuntimeError if a former one is running."""
        if (former := self._jobs.get(module)) is not None:
            if former.running:
                raise RuntimeError(
                    f"`fabric.setup` was called again for `{type(module).__name__}`, "
                    "which is being trained: set up a further optimizer with "
                    "`fabric.setup_optimizers`, or call `fabric.strategy.finish()`"
                )
            former.close()
            del self._jobs[module]  # before the next one is made, which may fail
        # Those of modules that a program has let go have nothing to tell by now.
        self._all = [one for one in self._all if one in self._jobs.values()]
        job = self._jobs[module] = make()
        self._all.append(job)
        job.unfinished = RuntimeError(_UNFINISHED)
        return job

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Starts the jobs of the modules whose weights an optimizer changes."""
        check_optimizers([optimizer])
        self._initial_states[optimizer] = InitialState(optimizer)
        for job in self.of_optimizer(optimizer):
            if not job.running:
                try:
                    job.start()
                except BaseException as exception:
                    if not job.closed:  # so that the module can be set up again
                        job.fail(exception)
                        job.close()
                    raise

    def of_module(self, module: nn.Module) -> Job | None:
        """The job of a module, or of the module that DDP has wrapped."""
        wrapped = isinstance(module, DistributedDataParallel)
        return self._jobs.get(module.module if wrapped else module)

    def of_optimizer(self, optimizer: Optimizer) -> list[Job]:
        """The jobs of the modules whose weights an optimizer changes."""
        weights = {id(w) for group in optimizer.param_groups for w in group["params"]}
        jobs = self._jobs.items()
        return [job for one, job in jobs if weights & {*map(id, one.parameters())}]

    def optimizers_of(self, job: Job) -> list[Optimizer]:
        """The optimizers that change the weights of a job's module."""
        return [one for one in self._initial_states if job in self.of_optimizer(one)]

    def reset_optimizers(self, module: nn.Module) -> None:
        """Resets the optimizers of a module to their initial state."""
        for optimizer in self.optimizers_of(self._jobs[module]):
            self._initial_states[optimizer].restore(optimizer)

    def together(
        self, collective: str, of_all: bool = True
    ) -> AbstractContextManager[None]:
        """A context that explains why a collective fails; all its learners enter it."""
        job = next(iter(self.running), None)
        return together(job, self.outside, collective, of_all)

    # --- the end

    def launch(
        self,
        launch: Callable[..., Any],
        program: Callable[..., Any],
        *args: Any,
        **kw: Any,
    ) -> Any:
        """Launches a program by `run`."""
        return launch(partial(self.run, program), *args, **kw)

    def run(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a program in all learners; training ends when it returns."""
        if self.running:  # a launch within a launch
            return program(*args, **kwargs)
        try:
            with self._named():
                output = program(*args, **kwargs)
            self.finish()
        except BaseException as exception:
            explain_unused_parameters(exception)
            self._fail(exception)
            raise
        return output

    def _fail(self, exception: BaseException) -> None:
        was_running = bool(self.running)
        for job in [one for one in self if not one.closed]:
            job.fail(exception)
            job.close()
        if self.outside is not None and not was_running:
            self.outside.announce(exception)

    def finish(self) -> list[Consensus]:
        """Ends training in the consensus model; returns the consensus distances."""
        measured = [job.finish() for job in self.running]
        self.close()
        return [consensus for consensus in measured if consensus is not None]

    def close(self) -> None:
        """Ends all jobs without waiting; weights have storage of their own again."""
        self._initial_states.clear()
        while self.watches:
            self.watches.pop().end()
        for job in self:
            job.close()
            job.flat.release()

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
