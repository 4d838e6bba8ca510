"""Talks to a router knowing only its address: services and types come from reflection. Usage: grpc_client.py ADDRESS MODEL"""

import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

address, model = sys.argv[1:]
SERVICE = "tessera.inference.v1.Inference"
channel = grpc.insecure_channel(address)
grpc.channel_ready_future(channel).result(timeout=20)

database = ProtoReflectionDescriptorDatabase(channel)
assert SERVICE in database.get_services(), database.get_services()
service = DescriptorPool(database).FindServiceByName(SERVICE)


def call(method, timeout=120, **fields):
    descriptor = service.FindMethodByName(method)
    request = GetMessageClass(descriptor.input_type)(**fields)
    answer = GetMessageClass(descriptor.output_type)
    make = channel.unary_stream if descriptor.server_streaming else channel.unary_unary
    stub = make(
        f"/{SERVICE}/{method}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=answer.FromString,
    )
    return stub(request, timeout=timeout)


health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
assert health.status == health_pb2.HealthCheckResponse.SERVING

assert [m.name for m in call("ListModels").models] == [model]

tokens = list(call("Tokenize", model=model, text="The capital of France is").tokens)
assert call("Detokenize", model=model, tokens=tokens).text == "The capital of France is"

options = {"max_tokens": 8, "temperature": 0.0}
by_text = list(call("Generate", model=model, text="The capital of France is", options=options))
by_tokens = list(call("Generate", model=model, tokens={"ids": tokens}, options=options))
ids = [t for part in by_text for t in part.tokens]
assert len(ids) == 8 and ids == [t for part in by_tokens for t in part.tokens]
assert by_text[-1].usage.prompt_tokens == len(tokens) and by_text[-1].usage.completion_tokens == 8
assert [part.finish_reason for part in by_text if part.finish_reason] == ["length"]

chat = list(call("Chat", model=model, messages=[{"role": "user", "content": "What is gravity?"}], options=options))
assert "".join(part.text for part in chat)

for fields, code in [
    ({"model": "no-such-model", "text": "x"}, grpc.StatusCode.NOT_FOUND),
    ({"model": model, "text": ""}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"model": model, "text": "x", "options": {"temperature": -1.0}}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"model": model, "text": "x", "options": {"n": 0}}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"model": model, "text": "x", "options": {"adapter": "a"}}, grpc.StatusCode.UNIMPLEMENTED),
]:
    try:
        list(call("Generate", **fields))
    except grpc.RpcError as error:
        assert error.code() == code, (fields, error)
        assert error.details(), fields
    else:
        raise AssertionError(f"{fields} was accepted")

print("grpc client: reflection, health, models, tokens, generate, chat and errors hold")
