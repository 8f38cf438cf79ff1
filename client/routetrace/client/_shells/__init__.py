"""Carry out read plans over gRPC: the blocking and the asyncio client."""
