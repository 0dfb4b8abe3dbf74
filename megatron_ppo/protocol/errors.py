"""Errors that cross a part's border. Each message names the key or part, the value seen and the value allowed."""


class MegatronPPOError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(MegatronPPOError):
    """Bad input, found before any worker, engine or process group has started."""


class StaleGroupError(MegatronPPOError):
    """A group older than `max_trajectory_age_steps` reached the learner; the buffer's gate is broken."""


class GroupMismatchError(MegatronPPOError):
    """A prompt group has the wrong size, order or bookkeeping."""


class GenerationError(MegatronPPOError):
    """The engine could not generate a group within its retries or its deadline."""


class ScoringError(MegatronPPOError):
    """The reward function raised, hung or ended its process, in every attempt."""


class EngineDeadError(MegatronPPOError):
    """An inference engine stopped serving for good."""


class EngineAsideError(MegatronPPOError):
    """An engine that waits for a version that the others serve already takes no new request; another one will."""


class PartDiedError(MegatronPPOError):
    """A process of the run (engine, collector, buffer, trainer rank) died; the message has the cause."""


class RankZeroFailedError(PartDiedError):
    """Rank 0 failed in a way that leaves nothing to be saved; raised on the other ranks."""


class StopRequested(MegatronPPOError):
    """Somebody asked the run to end: raised on every rank together, between two steps, after the state was saved."""


class WaitTimeoutError(MegatronPPOError):
    """A wait reached its limit; the message says what was waited for and since when."""


class RefitError(MegatronPPOError):
    """New weights did not reach every engine. The engines stay paused."""


class WeightMismatchError(RefitError):
    """An engine computes something else than the learner does under the same weights. Sending them again is no cure."""


class NonFiniteError(MegatronPPOError):
    """A loss, reward or gradient is NaN or infinite; no optimizer step was applied."""

    def __init__(self, message: str, ordinals: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ordinals = ordinals


class CheckpointError(MegatronPPOError):
    """A checkpoint is missing, torn, or of another run."""


def with_causes(error: BaseException) -> str:
    """`error` and what it was raised from or during, in one line.

    A disk that fills up while torch closes its zip file ends as a RuntimeError about positions in the file; only the
    error that was being handled then says that no space was left.
    """
    parts: list[str] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        parts.append(f"{type(link).__name__}: {link}")
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return ", because of ".join(parts)
