"""Calls with tritonclient: python triton_calls.py http|grpc <address> <what>. Ends with 0 if all is as it must be."""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import time

import numpy as np

PROTOCOL, ADDRESS, WHAT = sys.argv[1:]
client = importlib.import_module(f"tritonclient.{PROTOCOL}")
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
REVISION = "aaaaaaaaaa"


def connect():
    deadline = time.monotonic() + 30  # the gateway starts beside the worker
    while True:
        server = client.InferenceServerClient(ADDRESS)
        try:
            assert server.is_server_live()
            return server
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def make_input(data=ROWS, **more):
    made = client.InferInput("tx", list(data.shape), "FP32")
    made.set_data_from_numpy(data, **more)
    return made


def infer(server):
    result = server.infer("m", [make_input()], request_id="r-1", outputs=[client.InferRequestedOutput("ty")])
    assert (result.as_numpy("ty") == 2 * ROWS).all()
    response = result.get_response()
    found = response if isinstance(response, dict) else {"id": response.id, "model_version": response.model_version}
    assert (found["id"], found["model_version"]) == ("r-1", REVISION), found
    result = server.infer("m", [make_input()], model_version=REVISION)
    assert (result.as_numpy("ty") == 2 * ROWS).all()


def json_both_ways(server):
    output = client.InferRequestedOutput("ty", binary_data=False)
    assert (server.infer("m", [make_input(binary_data=False)], outputs=[output]).as_numpy("ty") == 2 * ROWS).all()
    half = [make_input(binary_data=False)], [client.InferRequestedOutput("ty", binary_data=True)]
    assert (server.infer("m", half[0], outputs=half[1]).as_numpy("ty") == 2 * ROWS).all()


def compressed(server):
    if PROTOCOL == "http":
        kinds = [("gzip", "gzip"), ("deflate", "deflate")]
        results = [
            server.infer("m", [make_input()], request_compression_algorithm=a, response_compression_algorithm=b)
            for a, b in kinds
        ]
    else:
        results = [server.infer("m", [make_input()], compression_algorithm=kind) for kind in ("gzip", "deflate")]
    assert all((result.as_numpy("ty") == 2 * ROWS).all() for result in results)


def at_once(server):
    """Many requests in flight."""
    if PROTOCOL == "http":
        server = client.InferenceServerClient(ADDRESS, concurrency=8)
        calls = [server.async_infer("m", [make_input(ROWS + i)]) for i in range(64)]
        results = [call.get_result() for call in calls]
    else:
        answers = queue.Queue()
        for i in range(64):
            server.async_infer("m", [make_input(ROWS + i)], lambda result, error: answers.put((result, error)))
        found = [answers.get(timeout=30) for _ in range(64)]
        assert all(error is None for _, error in found), [str(error) for _, error in found]
        firsts = {float(r.as_numpy("ty")[0, 0]): r for r, _ in found}
        results = [firsts[2.0 * i] for i in range(64)]
    assert all((r.as_numpy("ty") == 2 * (ROWS + i)).all() for i, r in enumerate(results))


def stream(server):
    answers = queue.Queue()
    server.start_stream(lambda result, error: answers.put((result, error)))
    for i in range(20):
        server.async_stream_infer("m", [make_input(ROWS + i)], request_id=str(i), enable_empty_final_response=True)
    server.async_stream_infer("another", [make_input()], request_id="bad")
    for i in range(20):
        result, error = answers.get(timeout=30)
        assert error is None, error
        assert result.get_response().id == str(i)
        assert result.get_response().parameters["triton_final_response"].bool_param
        assert (result.as_numpy("ty") == 2 * (ROWS + i)).all()
    result, error = answers.get(timeout=30)
    assert "no such model" in str(error), (result, error)
    server.stop_stream()


def describe(server):
    json_form = {} if PROTOCOL == "http" else {"as_json": True}
    assert server.is_server_ready()
    assert server.is_model_ready("m")
    assert server.is_model_ready("m", REVISION)
    assert not server.is_model_ready("m", "1")
    assert server.get_server_metadata(**json_form)["name"] == "trtmodel"
    described = server.get_model_metadata("m", **json_form)
    assert described["versions"] == [REVISION], described
    assert described["inputs"][0]["name"] == "tx"
    config = server.get_model_config("m", **json_form)
    config = config.get("config", config)
    assert (config["name"], config["max_batch_size"]) == ("m", 8), config
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    server.infer("m", [make_input()])
    for names in ((), ("m",), ("m", REVISION)):
        (statistics,) = server.get_inference_statistics(*names, **json_form)["model_stats"]
        assert int(statistics["inference_stats"]["success"]["count"]) > 0, statistics
    index = server.get_model_repository_index(**json_form)
    index = index if isinstance(index, list) else index["models"]
    assert [(m["name"], m["version"], m["state"]) for m in index] == [("m", REVISION, "READY")], index


def shared_memory(server):
    from tritonclient.utils import shared_memory as shm

    size = ROWS.nbytes
    key = f"/trtmodel-test-{os.getpid()}"
    region = shm.create_shared_memory_region("both", key, 2 * size)
    try:
        shm.set_shared_memory_region(region, [ROWS])
        server.register_system_shared_memory("in", key, size)
        server.register_system_shared_memory("out", key, size, offset=size)
        status = server.get_system_shared_memory_status(**({} if PROTOCOL == "http" else {"as_json": True}))
        regions = status if isinstance(status, list) else status["regions"].values()
        assert sorted(r["name"] for r in regions) == ["in", "out"], status
        given = client.InferInput("tx", [2, 4], "FP32")
        given.set_shared_memory("in", size)
        wanted = client.InferRequestedOutput("ty")
        wanted.set_shared_memory("out", size)
        result = server.infer("m", [given], outputs=[wanted])
        assert result.get_output("ty") is not None
        assert (shm.get_contents_as_numpy(region, np.float32, [4, 4])[2:] == 2 * ROWS).all()
        server.unregister_system_shared_memory("in")
        server.unregister_system_shared_memory()
        status = server.get_system_shared_memory_status(**({} if PROTOCOL == "http" else {"as_json": True}))
        assert not (status if isinstance(status, list) else status.get("regions"))
    finally:
        shm.destroy_shared_memory_region(region)


def refused(server):
    for call, words in (
        (lambda: server.infer("another", [make_input()]), "no such model"),
        (lambda: server.infer("m", [make_input()], model_version="1"), "not loaded"),
        (lambda: server.infer("m", [make_input(np.zeros((9, 4), np.float32))]), "[1..8, 4]"),
        (lambda: server.load_model("m"), "change its spec"),
        (lambda: server.unload_model("m"), "change its spec"),
    ):
        try:
            call()
            said = "it was answered"
        except client.InferenceServerException as e:
            said = str(e)
        assert words in said, said


def fields(_server):
    """Prints what the protocol's messages look like for this client."""
    from tritonclient.grpc import model_config_pb2, service_pb2

    messages = {}

    def add(described):
        messages[described.full_name] = {
            f.name: [f.number, f.type, f.is_repeated, f.containing_oneof.name if f.containing_oneof else ""]
            for f in described.fields
        }
        for nested in described.nested_types:
            add(nested)

    for module in (service_pb2, model_config_pb2):
        for described in module.DESCRIPTOR.message_types_by_name.values():
            add(described)
    (service,) = service_pb2.DESCRIPTOR.services_by_name.values()
    methods = {m.name: [m.input_type.full_name, m.output_type.full_name] for m in service.methods}
    types = {v.name: v.number for v in model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"].values}
    print(json.dumps({"messages": messages, "service": service.full_name, "methods": methods, "types": types}))


{f.__name__: f for f in (
    infer, json_both_ways, compressed, at_once, stream, describe, shared_memory, refused, fields,
)}[WHAT](None if WHAT == "fields" else connect())  # fmt: skip
