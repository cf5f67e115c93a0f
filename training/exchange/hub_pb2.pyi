from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_NONE: _ClassVar[Kind]
    KIND_OPEN: _ClassVar[Kind]
    KIND_MEAN: _ClassVar[Kind]
    KIND_GATHER: _ClassVar[Kind]
    KIND_ANCHOR: _ClassVar[Kind]
    KIND_FAILED: _ClassVar[Kind]
    KIND_MODEL: _ClassVar[Kind]
    KIND_RESIDUAL: _ClassVar[Kind]
KIND_NONE: Kind
KIND_OPEN: Kind
KIND_MEAN: Kind
KIND_GATHER: Kind
KIND_ANCHOR: Kind
KIND_FAILED: Kind
KIND_MODEL: Kind
KIND_RESIDUAL: Kind

class ControlUp(_message.Message):
    __slots__ = ("hello", "heartbeat", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    goodbye: Goodbye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "run_id", "rank", "world_size", "name")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    version: int
    run_id: str
    rank: int
    world_size: int
    name: str
    def __init__(self, version: _Optional[int] = ..., run_id: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Status(_message.Message):
    __slots__ = ("session", "started", "newcomer", "anchor_wanted", "members", "missing")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    NEWCOMER_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_WANTED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    session: int
    started: bool
    newcomer: bool
    anchor_wanted: bool
    members: _containers.RepeatedScalarFieldContainer[int]
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session: _Optional[int] = ..., started: _Optional[bool] = ..., newcomer: _Optional[bool] = ..., anchor_wanted: _Optional[bool] = ..., members: _Optional[_Iterable[int]] = ..., missing: _Optional[_Iterable[str]] = ...) -> None: ...

class BulkHeader(_message.Message):
    __slots__ = ("kind", "name", "codec", "size", "chunk", "weight", "contributors", "members", "rank", "session", "message", "refused", "flags", "stream")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    kind: Kind
    name: str
    codec: str
    size: int
    chunk: int
    weight: float
    contributors: _containers.RepeatedScalarFieldContainer[int]
    members: _containers.RepeatedScalarFieldContainer[int]
    rank: int
    session: int
    message: str
    refused: _containers.RepeatedScalarFieldContainer[int]
    flags: bytes
    stream: str
    def __init__(self, kind: _Optional[_Union[Kind, str]] = ..., name: _Optional[str] = ..., codec: _Optional[str] = ..., size: _Optional[int] = ..., chunk: _Optional[int] = ..., weight: _Optional[float] = ..., contributors: _Optional[_Iterable[int]] = ..., members: _Optional[_Iterable[int]] = ..., rank: _Optional[int] = ..., session: _Optional[int] = ..., message: _Optional[str] = ..., refused: _Optional[_Iterable[int]] = ..., flags: _Optional[bytes] = ..., stream: _Optional[str] = ...) -> None: ...
