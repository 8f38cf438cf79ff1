"""Settings of a client: its configuration, the environment, and options of all its reads."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from routetrace.client import ClientConfig, InvalidArgument, ReadOptions, RouteClient, Security
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.client_server import truth

ENVIRONMENT = {
    "ROUTETRACE_TARGET": "store:7000",
    "ROUTETRACE_RUN": "exp-7",
    "ROUTETRACE_TLS": "1",
    "ROUTETRACE_SERVER_NAME": "store",
    "ROUTETRACE_TOKEN": "rt_secret",
}


class TestClientConfig:
    def test_of_an_environment(self, monkeypatch):
        expected = ClientConfig(
            target="store:7000",
            run="exp-7",
            security=Security(tls=True, server_name="store", token="rt_secret"),
        )
        assert ClientConfig.from_env(ENVIRONMENT) == expected
        for name, value in ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
        assert ClientConfig.from_env() == expected
        assert ClientConfig() == expected
        assert ClientConfig(target="h", run="r").run == "r"
        assert ClientConfig.from_env({"ROUTETRACE_TARGET": "h"}) == ClientConfig(
            target="h:7411", run="default", security=Security()
        )

    def test_fields_win_over_the_environment(self):
        config = ClientConfig.from_env(
            ENVIRONMENT, target="other:1", run="r", timeout=5, security={"token": "rt_x"}
        )
        assert (config.target, config.run, config.timeout) == ("other:1", "r", 5)
        assert config.security == Security(token="rt_x")
        with pytest.raises(TypeError, match="tiemout"):
            ClientConfig.from_env(ENVIRONMENT, tiemout=5)

    def test_the_environment_is_checked(self):
        with pytest.raises(InvalidArgument, match="target is not set"):
            ClientConfig.from_env({})
        for wrong in ("maybe", 5):
            with pytest.raises(InvalidArgument) as caught:
                ClientConfig.from_env(ENVIRONMENT | {"ROUTETRACE_TLS": wrong})
            assert caught.value.field == "ROUTETRACE_TLS"

    def test_a_copy_has_all_of_it_and_text_no_token(self):
        config = ClientConfig.from_env(ENVIRONMENT, grpc_options={"grpc.x": 1})
        assert pickle.loads(pickle.dumps(config)) == config
        assert hash(pickle.loads(pickle.dumps(config))) == hash(config)
        assert "rt_secret" not in repr(config)

    @pytest.mark.parametrize(
        ("field", "wrong"),
        [
            ("target", 5),
            ("run", ""),
            ("timeout", None),
            ("max_message_bytes", -1),
            ("max_message_bytes", "1"),
            ("grpc_options", 5),
            ("grpc_options", {"a": 2**31}),
            ("grpc_options", {"\ud800": 1}),
            ("grpc_options", ["grpc.x"]),
            ("grpc_options", {1: 2}),
            ("grpc_options", {"grpc.x": True}),
            ("grpc_options", {"a": 10**5000}),
            ("security", {"token_file": "a\0b"}),
            ("security", "rt_secret"),
        ],
    )
    def test_a_wrong_field_is_named(self, field, wrong):
        with pytest.raises(InvalidArgument) as caught:
            ClientConfig(**{"target": "h:1", field: wrong})
        assert caught.value.field.split(".")[0] == field
        assert "rt_secret" not in str(caught.value)


class TestClientOfAConfiguration:
    def test_its_run_and_deadline_are_used(self, connect, server):
        deadlines = []

        def handler(request, context):
            deadlines.append(context.time_remaining())
            return pb.DeleteTraceResponse()

        server.script["DeleteTrace"] = handler
        client = connect(None, config=ClientConfig(target=server.target, run="r", timeout=700))
        client.delete("a")
        assert server.requests[0][1].run == "r"
        assert 600 < deadlines[0] < 705

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("target", "h:1"),
            ("run", "r"),
            ("timeout", 60.0),
            ("timeout", None),
            ("security", Security()),
        ],
    )
    def test_an_argument_beside_it_is_refused(self, field, value):
        config = ClientConfig(target="h:1")
        with pytest.raises(InvalidArgument) as caught:
            RouteClient(config=config, **{field: value})
        assert caught.value.field == field
        remedy = f"use dataclasses.replace(config, {field}=...)"
        assert str(caught.value) == (
            f"{field} is given beside config; expected one of them; {remedy}"
        )

    def test_a_replaced_field(self, connect):
        config = dataclasses.replace(ClientConfig(target="h:1"), run="other")
        assert repr(connect(None, config=config)) == "<RouteClient h:1 run='other' idle>"

    def test_what_is_none(self):
        with pytest.raises(InvalidArgument, match=r"config is .*expected ClientConfig"):
            RouteClient(config="h:1")


class TestOptionsOfAClient:
    """Each of several requests, in turn: the call's keyword, its options, those of the client."""

    @pytest.fixture
    def client(self, connect, server):
        server.serve(truth(3))
        return connect(server.target, options=ReadOptions(policy="latest", weight_version=3))

    def asked(self, server):
        return server.requests[-1][1]

    @pytest.mark.parametrize("call", ["get", "get_many", "follow"])
    def test_keyword_then_options_then_client(self, client, server, call):
        def read(**options):
            ids = ["req"] if call == "get_many" else "req"
            result = getattr(client, call)(ids, **options)
            return result if call == "get" else list(result)

        read(missing="mask")
        assert (self.asked(server).policy, self.asked(server).weight_version) == (
            pb.READ_POLICY_LATEST,
            3,
        )
        read(options=ReadOptions(missing="mask"))
        assert self.asked(server).policy == pb.READ_POLICY_AS_SAMPLED
        assert not self.asked(server).HasField("weight_version")
        read(options=ReadOptions(missing="mask"), policy="latest")
        assert self.asked(server).policy == pb.READ_POLICY_LATEST

    def test_a_copy_has_them(self, server):
        server.serve(truth(3))
        options = ReadOptions(policy="latest")
        with RouteClient(server.target, options=options) as client:
            data = pickle.dumps(client)
        with pickle.loads(data) as copy:
            copy.get("req")
        assert self.asked(server).policy == pb.READ_POLICY_LATEST

    def test_they_are_checked(self, connect, client):
        for wrong in ({"policy": "latest"}, None, 5):
            with pytest.raises(InvalidArgument, match="options is"):
                connect("h:1", options=wrong)
        with pytest.raises(InvalidArgument, match="options is"):
            client.get("req", options={"policy": "latest"})

    @pytest.mark.parametrize("wait_for", ["rows", "end"])
    def test_following_waits_for_the_begin(self, connect, server, wait_for):
        server.serve(truth(3))
        client = connect(server.target, options=ReadOptions(wait_for=wait_for))
        assert sum(map(len, client.follow("req", timeout=7))) == 3
        assert self.asked(server).wait_ms == 7000
        assert not self.asked(server).wait_for

    def test_the_timeout_of_all_calls_does_not_end_a_stream(self, connect, server):
        limits = []
        source = truth(3)

        def handler(request, context):
            limits.append(context.time_remaining())
            return iter(source.responses(request))

        server.script["GetTrace"] = handler
        client = connect(server.target, options=ReadOptions(timeout=5))
        client.get("req")
        list(client.follow("req"))
        list(client.follow("req", timeout=7))
        assert limits[0] < 6
        assert limits[1] is None or limits[1] > 60
        assert 6 < limits[2] < 8
