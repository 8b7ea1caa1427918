"""What workers say to each other, and how bytes from a peer become checked records.

A peer's bytes are untrusted: they are limited in size, decoded into exactly these types, and validated like any other
layout. Control messages travel over ZeroMQ; ``Done`` also travels as a NIXL notification, behind the bytes it reports.
"""

from __future__ import annotations

from typing import Any

import msgspec

from nixl_fast.errors import GeometryError
from nixl_fast.layout import EngineLayout
from nixl_fast.plan import Direction

PROTOCOL_VERSION = 2
"""Workers of different versions refuse each other at the handshake."""

MAX_MESSAGE_BYTES = 16 << 20
"""A larger message is dropped by ZeroMQ; the largest real one is a layout with its NIXL metadata."""


MAX_GROUPS, MAX_REGIONS = 128, 2048
"""A layout takes time in proportion to the product of its groups and regions to check, and a peer wrote it."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, array_like=True):
    """Base of everything on the wire."""


class Hello(Message, frozen=True, tag=True):
    """The first message of a connection: who asks."""

    instance: str
    layout: EngineLayout


class Welcome(Message, frozen=True, tag=True):
    """The answer to `Hello`: everything needed to plan and to reach this rank's memory."""

    instance: str
    layout: EngineLayout
    agent: str
    metadata: bytes
    lease: float


class Refused(Message, frozen=True, tag=True):
    """The answer to anything that cannot be: the reason, with both values."""

    reason: str


class Begin(Message, frozen=True, tag=True):
    """A transfer is about to touch the blocks of these requests; extends their leases. Also the heartbeat.

    READ concerns requests that the receiver holds, WRITE those that it expects.
    """

    sent: float
    direction: Direction
    request_ids: list[str]


class Held(Message, frozen=True, tag=True):
    """The answer to `Begin`: these requests' blocks are held from the time it was sent for one more lease.

    Each comes with the nonce of this promise to this rank, which its `Done` has to carry.
    """

    sent: float
    generation: int
    request_ids: list[str]
    nonces: list[int]


class Gone(Message, frozen=True, tag=True):
    """The answer to `Begin` for requests whose blocks are not held, or not any more.

    ``sent`` is the `Begin`'s, or 0 where a promise is taken back.
    """

    sent: float
    request_ids: list[str]


class Ping(Message, frozen=True, tag=True):
    """Asks whether the other side is there."""


class Pong(Message, frozen=True, tag=True):
    """Still here, with this registration."""

    instance: str
    generation: int


class Done(Message, frozen=True, tag=True):
    """One rank has finished with a request. ``request_id`` and ``nonce`` are the receiver's, from its `Held`."""

    request_id: str
    engine_id: str
    pp_rank: int
    tp_rank: int
    nonce: int
    ok: bool


AnyMessage = Hello | Welcome | Refused | Begin | Held | Gone | Ping | Pong | Done


class _Sizes(msgspec.Struct, frozen=True):
    """The part of a layout whose product decides how long it takes to check."""

    groups: list[msgspec.Raw] = []
    regions: list[msgspec.Raw] = []
    mamba: _Sizes | None = None


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    version: int
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(_Envelope)
_parts = msgspec.msgpack.Decoder(list[msgspec.Raw])
_sizes = msgspec.msgpack.Decoder(_Sizes)
_tag = msgspec.msgpack.Decoder(str)
_body: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """A message as bytes, with the protocol version in front."""
    return _encoder.encode(_Envelope(PROTOCOL_VERSION, msgspec.Raw(_encoder.encode(message))))


def decode(data: bytes) -> AnyMessage:
    """The message in ``data``.

    Raises:
        GeometryError: Too long, not a message, of another protocol version, or with a layout that is refused.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise GeometryError(f"message of {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        envelope = _envelope.decode(data)
        if envelope.version != PROTOCOL_VERSION:
            raise GeometryError(f"protocol version: local {PROTOCOL_VERSION}, remote {envelope.version}")
        _check_size(envelope.body)
        message: AnyMessage = _body.decode(envelope.body)
        return message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise GeometryError(f"not a message of this protocol: {error}") from None


def _check_size(body: msgspec.Raw) -> None:
    """Refuses a layout that would take long to check, before it is checked."""
    parts = _parts.decode(body)
    if len(parts) < 3 or _tag.decode(parts[0]) not in ("Hello", "Welcome"):
        return
    sizes = _sizes.decode(parts[2])
    regions = len(sizes.regions) + (len(sizes.mamba.regions) if sizes.mamba else 0)
    if len(sizes.groups) > MAX_GROUPS or regions > MAX_REGIONS:
        raise GeometryError(
            f"layout of {len(sizes.groups)} groups and {regions} regions, at most {MAX_GROUPS} and {MAX_REGIONS} are allowed"
        )
