"""Stories of clients of a Tinker server, each in a process of its own: the client leaves
its connections open.

    python tests/kit/tinker_stories.py NAME URL [ARGUMENT...]
"""

from __future__ import annotations

import json
import math
import random
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tinker
import torch
from tinker import types

KEYS = {"ann": "tml-test-ann", "bob": "tml-test-bob"}
MODEL = "asyncrl/scratch"
PROMPT = [5, 6, 7, 8]
TEXT = [5, 6, 7, 8, 9, 10, 11, 12]
ADAM = types.AdamParams(learning_rate=1e-2)


@dataclass
class Server:
    url: str

    def client(self, owner: str = "ann") -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=KEYS[owner])


def datum(ids: list[int], weights: list[float], **more: Any) -> types.Datum:
    """Return a datum of cross entropy, shifted as the client shifts."""
    inputs = {
        "target_tokens": types.TensorData(data=ids[1:], dtype="int64"),
        "weights": types.TensorData(data=weights[1:], dtype="float32"),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs, **more
    )


def sampled_datum(
    prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float
) -> types.Datum:
    """Return a datum of a policy loss for a sampled answer."""
    ids = prompt + tokens
    num_prompt = len(prompt) - 1
    values = {
        "logprobs": [0.0] * num_prompt + logprobs,
        "advantages": [0.0] * num_prompt + [advantage] * len(tokens),
    }
    inputs = {
        name: types.TensorData(data=data, dtype="float32")
        for name, data in values.items()
    }
    inputs["target_tokens"] = types.TensorData(data=ids[1:], dtype="int64")
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs
    )


def trained(client: tinker.ServiceClient, **more: Any) -> tinker.TrainingClient:
    return client.create_lora_training_client(MODEL, rank=8, seed=1, **more).result()


def step(training: tinker.TrainingClient, *data: types.Datum) -> float:
    """Train on texts; return the loss before."""
    weights = [0.0] * 4 + [1.0] * 4
    given = [*data] or [datum(TEXT, weights)]
    loss = training.forward_backward(given, "cross_entropy")
    training.optim_step(ADAM).result()
    return float(loss.result().metrics["loss:sum"])


def sample(
    sampler: tinker.SamplingClient, prompt: list[int] = PROMPT, **params: Any
) -> Any:
    given = {"max_tokens": 8, "seed": 3, "temperature": 1.0} | params
    return sampler.sample(
        prompt=types.ModelInput.from_ints(prompt),
        num_samples=1,
        sampling_params=types.SamplingParams(**given),
    ).result()


def story_loss_falls_and_sampler_and_trainer_agree(server: Server) -> None:
    with server.client() as client:
        training = trained(client)
        losses = [step(training) for _ in range(6)]
        assert losses[-1] < 0.5 * losses[0]
        sampler = training.save_weights_and_get_sampling_client().result()
        (answer,) = sample(sampler).sequences
        one = sampled_datum(PROMPT, answer.tokens, answer.logprobs, 1.0)
        scored = training.forward([one], "importance_sampling").result()
        found = scored.loss_fn_outputs[0]["logprobs"].tolist()[len(PROMPT) - 1 :]
        assert found == pytest.approx(answer.logprobs, abs=1e-4)
        ids = types.ModelInput.from_ints(PROMPT + list(answer.tokens))
        prompt_logprobs = sampler.compute_logprobs(ids).result()
        assert prompt_logprobs[0] is None
        assert prompt_logprobs[len(PROMPT) :] == pytest.approx(
            answer.logprobs, abs=1e-4
        )
        # The base model has other logprobs, and a snapshot keeps its own.
        base = client.create_sampling_client(base_model=MODEL).result()
        assert base.compute_logprobs(ids).result()[-1] != pytest.approx(
            found[-1], abs=1e-3
        )
        step(training)
        again = sampler.compute_logprobs(ids).result()
        assert again[1:] == prompt_logprobs[1:]


def story_inflight_sampler_follows_the_weights(server: Server) -> None:
    with server.client() as client:
        training = trained(client)
        ids = types.ModelInput.from_ints(TEXT)
        first = training.save_weights_and_get_sampling_client(kind="inflight").result()
        before = first.compute_logprobs(ids).result()
        step(training)
        second = training.save_weights_and_get_sampling_client(kind="inflight").result()
        after = second.compute_logprobs(ids).result()
        assert after[1:] != pytest.approx(before[1:], abs=1e-4)
        assert first.compute_logprobs(ids).result()[1:] == after[1:]


def story_prompt_numbers_agree_with_each_other(server: Server) -> None:
    """Likeliest tokens, given targets and draws of one prompt."""
    with server.client() as client:
        sampler = client.create_sampling_client(base_model=MODEL).result()
        num = len(TEXT) - 1
        targets = types.TensorData(
            data=[
                TEXT[1 + row] if col else -1 for row in range(num) for col in range(2)
            ],
            dtype="int64",
            shape=[num, 2],
        )
        answer = sampler.sample(
            prompt=types.ModelInput.from_ints(TEXT),
            num_samples=2,
            sampling_params=types.SamplingParams(max_tokens=2, temperature=0.5),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=5,
            target_prompt_logprobs=targets,
        ).result()
        own = answer.prompt_logprobs[1:]
        assert answer.target_prompt_logprobs is not None
        asked = answer.target_prompt_logprobs.to_numpy()
        assert asked[:, 0].tolist() == [0.0] * num
        assert asked[:, 1].tolist() == pytest.approx(own, abs=1e-6)
        top = answer.topk_prompt_logprobs
        assert top[0] is None or not top[0]
        for place, row in enumerate(top[1:]):
            values = [value for _, value in row]
            assert values == sorted(values, reverse=True)
            known = dict(row)
            if TEXT[place + 1] in known:
                assert known[TEXT[place + 1]] == pytest.approx(own[place], abs=1e-6)
        assert answer.sequences[0].tokens != answer.sequences[1].tokens


def story_stops(server: Server) -> None:
    with server.client() as client:
        sampler = client.create_sampling_client(base_model=MODEL).result()
        for stop in ([], [9, 10]):
            answers = [
                sample(sampler, max_tokens=40, seed=seed, stop=stop).sequences[0]
                for seed in range(6)
            ]
            stopped = [one for one in answers if one.stop_reason == "stop"]
            assert bool(stopped) == bool(stop)
            # Without any stop, EOS does not end an answer either.
            lasting = [len(one.tokens) for one in answers if one not in stopped]
            assert set(lasting) <= {40}
            ends = [one.tokens[-1] for one in stopped]
            assert all(one in (9, 10) or one == min(ends) for one in ends)
            assert all(not {9, 10} & {*one.tokens[:-1]} for one in stopped)


def story_equal_seeds_draw_equal_tokens(server: Server) -> None:
    with server.client() as client:
        sampler = client.create_sampling_client(base_model=MODEL).result()
        first, second = (sample(sampler, seed=11).sequences[0] for _ in range(2))
        assert first.tokens == second.tokens
        assert sample(sampler, seed=12).sequences[0].tokens != first.tokens


def script(
    client: tinker.ServiceClient, seed: int, num_steps: int = 6
) -> dict[str, Any]:
    """Train and sample on policy; return everything that the client saw."""
    training = client.create_lora_training_client(
        MODEL, rank=4 + 4 * seed, seed=seed
    ).result()
    seen: dict[str, Any] = {"answers": [], "losses": []}
    for number in range(num_steps):
        sampler = training.save_weights_and_get_sampling_client().result()
        answers = [
            sample(sampler, seed=10 * number + one).sequences[0] for one in range(3)
        ]
        data = [
            sampled_datum(PROMPT, one.tokens, one.logprobs, float(place - 1))
            for place, one in enumerate(answers)
        ]
        loss = training.forward_backward(data, "ppo")
        training.optim_step(ADAM).result()
        seen["answers"] += [one.tokens for one in answers]
        seen["losses"].append(loss.result().metrics["loss:sum"])
    seen["path"] = training.save_state("last").result().path
    return seen


def post(server: Server, path: str, body: object, key: str = "ann") -> tuple[int, Any]:
    """Send a request without the client."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{server.url}/api/v1/{path}",
        data,
        {"X-API-Key": KEYS.get(key, key), "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            text = error.read()
            if error.code >= 500:
                raise AssertionError((path, data, text)) from error
            return error.code, json.loads(text)


def result(server: Server, request_id: str, key: str = "ann") -> tuple[int, Any]:
    return post(server, "retrieve_future", {"request_id": request_id}, key)


def opened(server: Server) -> str:
    """Create a session and a model by hand; return the model's id."""
    _, session = post(
        server, "create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"}
    )
    body = {
        "session_id": session["session_id"],
        "model_seq_id": 0,
        "base_model": MODEL,
        "lora_config": {"rank": 4, "seed": 1},
        "a_field_of_tomorrow": 1,
    }
    status, made = post(server, "create_model", body)
    assert status == 200, made
    assert post(server, "create_model", body) == (status, made)
    assert result(server, made["request_id"])[0] == 200
    return str(made["model_id"])


def story_repeated_and_reordered_requests_run_once(server: Server) -> None:
    model = opened(server)
    bodies = [
        {"model_id": model, "seq_id": seq, "path": f"s{seq}"} for seq in (1, 2, 3)
    ]
    # The newest comes first, and each twice.
    ids = [post(server, "save_weights", one) for one in (*bodies[::-1], *bodies)]
    assert {status for status, _ in ids} == {200}
    answers = [result(server, one["request_id"])[1] for _, one in ids]
    assert answers[:3] == answers[:2:-1]
    assert {one["path"] for one in answers} == {
        f"tinker://{model}/weights/s{seq}" for seq in (1, 2, 3)
    }


def story_fault_of_a_training_request_is_in_its_future(server: Server) -> None:
    """A refusal at once would leave a hole in the numbers for good."""
    model = opened(server)
    dimuon = {"type": "dimuon", "version": 1, "learning_rate": 1e-3}
    step = {"model_id": model, "seq_id": 1, "optimizer_params": dimuon}
    status, made = post(server, "optim_step", step)
    assert status == 200
    status, answer = result(server, made["request_id"])
    assert status == 200
    assert answer["category"] == "user"
    assert "dimuon" in answer["error"]
    for seq, path, more, said in (
        (2, "optim_step", {"adam_params": {}}, "gradient"),
        (3, "optim_step", {"adam_params": {"learning_rate": "x"}}, "learning_rate"),
        (4, "save_weights", {"path": "a/b"}, "a/b"),
        (5, "load_weights", {"path": "x", "optimizer": True}, "tinker://"),
        (6, "save_weights_external", {"path": "x"}, "external"),
    ):
        body = {"model_id": model, "seq_id": seq, **more}
        status, made = post(server, path, body)
        assert status == 200
        status, answer = result(server, made["request_id"])
        assert status == 200
        assert answer["category"] == "user"
        assert said in answer["error"]


def story_failed_part_takes_the_step_with_it(server: Server) -> None:
    """An optimizer step must not apply a part of a gradient."""
    with server.client() as client:
        training = trained(client)
        bad = datum(TEXT, [0.0] * 4 + [math.nan] * 4)
        whole = training.forward_backward([datum(TEXT, [1.0] * 8)], "cross_entropy")
        part = training.forward_backward([bad], "cross_entropy")
        stepped = training.optim_step(ADAM)
        assert whole.result().metrics["loss:sum"] > 0
        with pytest.raises(tinker.RequestFailedError):
            part.result()
        with pytest.raises(tinker.RequestFailedError, match="not whole"):
            stepped.result()
        before = training.forward([datum(TEXT, [1.0] * 8)], "cross_entropy").result()
        assert before.metrics == whole.result().metrics


def ask(url: str, key: str) -> object:
    rest = tinker.RestClient(base_url=url, api_key=key)
    return rest.get_server_capabilities().result()


def story_keys_reach_their_own_only(server: Server) -> None:
    with server.client() as ann, server.client("bob") as bob:
        training = trained(ann)
        path = training.save_state("mine").result().path
        with pytest.raises(tinker.APIStatusError):
            bob.create_training_client_from_state(path).result()
        with pytest.raises(tinker.APIStatusError):
            bob.create_sampling_client(model_path=path).result()
        assert (
            post(server, "get_info", {"model_id": training.model_id}, "bob")[0] == 404
        )
        rest = tinker.RestClient(base_url=server.url, api_key=KEYS["bob"])
        listed = rest.list_user_checkpoints().result().checkpoints
        assert path not in [one.tinker_path for one in listed]
        own = tinker.RestClient(base_url=server.url, api_key=KEYS["ann"])
        own.publish_checkpoint_from_tinker_path(path).result()
        bob.create_sampling_client(model_path=path).result()
    with pytest.raises(tinker.AuthenticationError):
        ask(server.url, "tml-wrong")


def story_state_goes_on_where_it_was_saved(server: Server) -> None:
    with server.client() as client:
        training = trained(client)
        step(training)
        path = training.save_state("middle").result().path
        losses = [step(training) for _ in range(3)]
        again = client.create_training_client_from_state_with_optimizer(path).result()
        assert [step(again) for _ in range(3)] == losses
        fresh = client.create_training_client_from_state(path).result()
        assert step(fresh) == losses[0]
        assert step(fresh) != losses[1]
        sampler = client.create_sampling_client(model_path=path).result()
        assert sample(sampler).sequences


def story_old_tokens_are_masked_and_told(server: Server) -> None:
    with server.client() as client:
        training = trained(client)
        sampler = training.save_weights_and_get_sampling_client().result()
        (answer,) = sample(sampler).sequences
        one = sampled_datum(PROMPT, answer.tokens, answer.logprobs, 1.0)
        name, num = answer.sequence_id, len(answer.tokens)
        first = types.PromptProvenanceSpan(sequence_id=name, offset=0, length=4)
        own = types.SampledProvenanceSpan(sequence_id=name, offset=0, length=num)
        spans = {
            "model_input_spans": [first, replace(own, length=num - 1)],
            "loss_fn_input_spans": [replace(first, offset=1, length=3), own],
        }
        known = replace(one, **spans)
        for _ in range(2):
            step(training)
        bound = {"max_staleness": 2, "on_overdue": "mask"}
        fresh = training.forward_backward(
            [known], "importance_sampling", bound
        ).result()
        assert fresh.metrics["staleness:max"] == 2
        assert fresh.metrics["masked_tokens:sum"] == 0
        bound["max_staleness"] = 1
        old = training.forward_backward([known], "importance_sampling", bound).result()
        assert old.metrics["masked_tokens:sum"] == len(answer.tokens)
        assert old.metrics["loss:sum"] == 0
        stepped = training.optim_step(ADAM).result()
        assert stepped.metrics["staleness:max"] == 2
        bound["on_overdue"] = "refuse"
        with pytest.raises(tinker.RequestFailedError, match="max_staleness"):
            training.forward_backward([known], "importance_sampling", bound).result()
        bound = {"max_staleness": 0}
        assert training.forward([one], "importance_sampling", bound).result().metrics
        with pytest.raises(tinker.RequestFailedError, match="no record"):
            training.forward_backward(
                [one], "importance_sampling", {"max_staleness": 1}
            ).result()


def story_custom_loss_is_a_weighted_cross_entropy(server: Server) -> None:
    def loss_of(_: Any, logprobs: list[Any]) -> Any:
        loss = -torch.cat(logprobs).sum()
        return loss, {"mine": loss.item()}

    with server.client() as client:
        first, second = trained(client), trained(client)
        one = datum(TEXT, [1.0] * 8)
        custom = first.forward_backward_custom([one], loss_of).result()
        plain = second.forward_backward([one], "cross_entropy").result()
        assert custom.metrics["mine"] == pytest.approx(
            plain.metrics["loss:sum"], rel=1e-5
        )
        for training in (first, second):
            training.optim_step(ADAM).result()
        after = [
            one_.forward([one], "cross_entropy").result() for one_ in (first, second)
        ]
        assert after[0].metrics["loss:sum"] == pytest.approx(
            after[1].metrics["loss:sum"], rel=1e-4
        )


def story_nonsense_gives_no_server_error(server: Server) -> None:
    """A thousand broken requests; the server then still serves."""
    model = opened(server)
    session = model.partition(":")[0]
    rng = random.Random(0)
    good: dict[str, dict[str, Any]] = {
        "create_model": {"session_id": session, "model_seq_id": 1, "base_model": MODEL},
        "optim_step": {
            "model_id": model,
            "seq_id": 1,
            "adam_params": {"learning_rate": 1},
        },
        "save_weights": {"model_id": model, "seq_id": 2, "path": "x"},
        "load_weights": {
            "model_id": model,
            "seq_id": 3,
            "path": "tinker://a/weights/b",
            "optimizer": True,
        },
        "save_weights_for_sampler": {"model_id": model, "seq_id": 4, "path": "y"},
        "create_sampling_session": {
            "session_id": session,
            "sampling_session_seq_id": 0,
        },
        "asample": {
            "base_model": MODEL,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 2},
            "num_samples": 1,
        },
        "retrieve_future": {"request_id": "sample-nothing"},
        "get_info": {"model_id": model},
        "weights_info": {"tinker_path": "tinker://x"},
        "session_heartbeat": {"session_id": session},
        "cancel_future": {"request_id": "x"},
        "forward_backward": {},
    }
    odd: list[Any] = [
        None,
        -1,
        2**70,
        "",
        "x" * 300,
        [],
        {},
        [[]],
        1e308,
        True,
        "../../etc",
        "é\0",
    ]
    for _ in range(1000):
        path, body = rng.choice([*good.items()])
        changed: Any = json.loads(json.dumps(body))
        for _ in range(rng.randint(0, 3)):
            place = changed
            while isinstance(place, dict) and place:
                key = rng.choice([*place])
                if isinstance(place[key], dict) and rng.random() < 0.7:
                    place = place[key]
                    continue
                if path in ("save_weights", "optim_step") and key == "seq_id":
                    break  # a hole is tested elsewhere
                place[key] = rng.choice(odd)
                break
        sent: Any = changed
        if path == "forward_backward" or rng.random() < 0.1:
            sent = rng.randbytes(rng.randint(0, 200))
        post(server, path, sent)
    with server.client() as client:
        assert step(trained(client)) > 0


def story_refused_requests_get_a_sentence(server: Server) -> None:
    for path in ("copy_weights", "create_custom_loss", "billing/usage", "nonsense"):
        status, answer = post(server, path, {})
        assert status == 400
        assert path in answer["detail"]


def story_script(server: Server, seed: str, owner: str, num_steps: str) -> None:
    """Print what a script sees."""
    with server.client(owner) as client:
        print(json.dumps(script(client, int(seed), int(num_steps))))


if __name__ == "__main__":
    name, url, *more = sys.argv[1:]
    globals()[f"story_{name}"](Server(url), *more)
