"""What an error says of the errors that led to it."""

from megatron_ppo.protocol.errors import CheckpointError, with_causes


def raised(action: object) -> BaseException:
    assert callable(action)
    try:
        action()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_met_while_another_was_handled_names_both() -> None:
    def close_after_a_full_disk() -> None:
        try:
            raise OSError(28, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")

    assert with_causes(raised(close_after_a_full_disk)) == (
        "RuntimeError: unexpected pos 704 vs 598, because of OSError: [Errno 28] No space left on device"
    )


def test_a_declared_cause_comes_before_the_context_and_a_suppressed_context_is_left_out() -> None:
    def declared() -> None:
        try:
            raise ValueError("context")
        except ValueError:
            raise CheckpointError("outer") from KeyError("cause")

    def suppressed() -> None:
        try:
            raise ValueError("context")
        except ValueError:
            raise CheckpointError("outer") from None

    assert with_causes(raised(declared)) == "CheckpointError: outer, because of KeyError: 'cause'"
    assert with_causes(raised(suppressed)) == "CheckpointError: outer"


def test_errors_that_name_each_other_end() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert with_causes(first) == "ValueError: first, because of ValueError: second"
