#!/usr/bin/env bash
# Regenerates the committed stubs. The old compiler is on purpose: its output runs on protobuf
# 4.25 to 7 and grpcio 1.62 and up, which vLLM and Megatron images need. Python <= 3.12.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${PROTO_VENV:-.venv-proto}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install -q 'grpcio-tools==1.62.3' 'mypy-protobuf==3.6.0' 'setuptools<81'
PATH="$venv/bin:$PATH" "$venv/bin/python" -m grpc_tools.protoc -I proto \
  --python_out=proto --grpc_python_out=proto --mypy_out=proto --mypy_grpc_out=proto \
  routetrace/v1/routetrace.proto
# Stored messages have no service.
PATH="$venv/bin:$PATH" "$venv/bin/python" -m grpc_tools.protoc -I proto \
  --python_out=proto --mypy_out=proto \
  routetrace/stored/format5.proto routetrace/stored/parts.proto
