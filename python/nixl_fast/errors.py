"""What nixl-fast raises: every refusal is a :class:`NixlFastError`, raised before anything is posted."""


class NixlFastError(Exception):
    """Base class of everything this package raises on purpose."""


class GeometryError(NixlFastError, ValueError):
    """A layout, or a pair of layouts, that no plan can be made for; names the field and the values."""


class BlockIdError(NixlFastError, ValueError):
    """Block ids that name no block or name one twice; names the group, the position, the value and the limit."""


class PairingError(NixlFastError, ValueError):
    """A request whose blocks cannot be paired with certainty; names the group and both counts."""


class StalePlanError(NixlFastError, RuntimeError):
    """A plan made for a peer that has registered its memory anew since; make a new plan."""


class TransferError(NixlFastError, RuntimeError):
    """NIXL or the peer failed while bytes were on their way."""
