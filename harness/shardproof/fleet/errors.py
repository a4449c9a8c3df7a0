"""What can go wrong between the controller, the fork server and the ranks."""

from __future__ import annotations


class FleetError(Exception):
    """Base class of every error that the fleet package raises on purpose."""


class MessageError(FleetError, TypeError):
    """A value cannot travel in a message; the text names the key that holds it."""


class ProtocolError(FleetError):
    """The bytes on a channel are not a message: the peer is not one of ours, or wrote garbage."""


class ChannelClosed(FleetError, EOFError):  # noqa: N818  an end, not always an error
    """The other end of a channel is gone: nothing more can be sent, or will be received."""


class ChannelTimeout(FleetError, TimeoutError):  # noqa: N818  as above
    """No complete message came within the time that was given."""


class ServerError(FleetError):
    """The fork server could not be started, died, or does not answer."""


class SurvivorError(FleetError):
    """A process did not go away although it was sent SIGKILL."""


class PreloadError(FleetError):
    """A module that ranks should find imported cannot be preloaded.

    ``module`` is its name and ``details`` the traceback (or the reason) as text.
    """

    def __init__(self, module: str, details: str) -> None:
        self.module = module
        self.details = details
        super().__init__(module, details)

    def __str__(self) -> str:
        return (
            f"cannot preload {self.module!r} for the ranks (no rank was started). Correct the "
            f"module, or take it off the preload list.\n{self.details.rstrip()}"
        )


class PreloadThreadError(PreloadError):
    """A module can be imported, but starts threads, and so must be imported in each rank."""
