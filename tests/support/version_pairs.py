"""Pairs of protobuf and grpcio that the wheel is tried with."""

from __future__ import annotations

#: The oldest pair that is declared, the majors between, and whatever is newest. One release of
#: protobuf's generated code is promised to run on two majors; ours is older than that.
PAIRS = {
    "protobuf-4.25": ("protobuf==4.25.8", "grpcio==1.62.3"),
    "protobuf-5.29": ("protobuf==5.29.5", "grpcio==1.71.2"),
    "protobuf-6.33": ("protobuf==6.33.5", "grpcio==1.78.0"),
    "newest": ("protobuf", "grpcio"),
}
