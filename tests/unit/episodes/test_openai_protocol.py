"""Tests of the gateway's Responses API with OpenAI's own client; whole programs are in ``test_clients.py``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest
from gateway_cases import CALL, LOOK, Scene, play
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlpipe.episodes.chat_request import ChatQuestion, RequestRefused
from rlpipe.episodes.openai_protocol import as_chat_request

TOOL = {"type": "function", **LOOK["function"], "strict": False}  # type: ignore[dict-item]
THOUGHT = "<think>\nhm\n</think>\n\nNorth."


async def talk(scene: Scene, *, stream: bool) -> list[Any]:
    """Ask three times, and send back all that was answered, as the client has it."""
    client, items, answers = scene.client(), [{"role": "user", "content": "Where?"}], []
    for _ in range(3):
        asked: dict[str, Any] = {"model": "any", "instructions": "Be brief.", "input": items, "tools": [TOOL]}
        if stream:
            async with client.responses.stream(**asked) as events:
                answer = await events.get_final_response()
        else:
            answer = await client.responses.create(**asked)
        answers.append(answer)
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "north"} for call in calls]
        items += [] if calls else [{"role": "user", "content": [{"type": "input_text", "text": "And then?"}]}]
    return answers


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_calls_and_reasoning_is_one_sequence(stream: bool) -> None:
    scene = Scene([CALL, THOUGHT, "Then east."], template_name="trl/qwen3")
    episode, answers = play(scene, lambda own: talk(own, stream=stream))
    assert [answer.output_text for answer in answers] == ["", "North.", "Then east."]
    assert [[item.type for item in answer.output] for answer in answers] == [
        ["function_call"],
        ["reasoning", "message"],
        ["message"],
    ]
    assert all(answer.status == "completed" and answer.usage.output_tokens > 0 for answer in answers)
    assert len(episode.graph.branches()) == 1
    assert len(episode.graph.turns) == 3
    assert "Be brief." in scene.template.tokenizer.decode(scene.contexts[0])


def test_a_request_may_continue_from_an_earlier_answer() -> None:
    async def program(scene: Scene) -> None:
        create = scene.client().responses.create
        first = await create(model="any", input="Where?")
        second = await create(model="any", input="And then?", previous_response_id=first.id)
        await create(model="any", input="Or?", previous_response_id=first.id)
        await create(model="any", input="And then?", previous_response_id=second.id, instructions="Be brief.")
        with pytest.raises(openai.BadRequestError, match="this episode has no answer 'chatcmpl-9'"):
            await create(model="any", input="x", previous_response_id="chatcmpl-9")

    scene = Scene(["North.", "East.", "West.", "South."])
    episode, _ = play(scene, program)
    assert len(episode.graph.turns) == 4
    assert len(episode.graph.branches()) == 3, "two go on from the first, and instructions begin another"
    last = scene.template.tokenizer.decode(scene.contexts[-1])
    assert [text in last for text in ("Be brief.", "Where?", "North.", "East.", "West.")] == [True] * 4 + [False]


def test_parts_of_answers_may_be_sent_back_by_their_ids() -> None:
    async def program(scene: Scene) -> None:
        create = scene.client().responses.create
        items: list[Any] = [{"role": "user", "content": "Where?"}]
        for _ in range(3):
            answer = await create(model="any", input=items, tools=[TOOL])
            assert answer.id.startswith("resp_"), "by which clients tell ids that they may name"
            items += [{"type": "item_reference", "id": item.id} for item in answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "north"} for call in calls]
            items += [] if calls else [{"role": "user", "content": "And then?"}]

    episode, _ = play(Scene([CALL, THOUGHT, "Then east."], template_name="trl/qwen3"), program)
    assert len(episode.graph.branches()) == 1


def test_instructions_hold_for_one_request() -> None:
    async def program(scene: Scene) -> None:
        create = scene.client().responses.create
        first = await create(model="any", input="Where?", instructions="Be brief.")
        await create(model="any", input="And then?", previous_response_id=first.id)

    scene = Scene(["North.", "East."])
    play(scene, program)
    assert "Be brief." not in scene.template.tokenizer.decode(scene.contexts[-1])


def test_a_limit_may_shrink_and_a_cut_answer_is_incomplete() -> None:
    class Cut(Scene):
        async def sample(self, token_ids: Any, **options: Any) -> Any:
            return replace(await super().sample(token_ids, **options), finish_reason="length")

    async def program(scene: Scene) -> Any:
        return await scene.client().responses.create(model="any", input="Where?", max_output_tokens=7)

    scene = Cut(["North."])
    _, answer = play(scene, program)
    assert scene.limits == [7]
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"background": True}, "background is not supported"),
        ({"conversation": "conv_1"}, "conversation is not supported"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format={'type': 'json_object'} is not supported"),
        ({"tool_choice": {"type": "function", "name": "look"}}, "tool_choice={'type': 'function', .* is not supported"),
        ({"tools": [{"type": "web_search"}]}, "the tool 'web_search' is none of the program's functions"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "this episode has no item 'x'"),
        ({"input": [{"type": "computer_call"}]}, "an item of the type 'computer_call'"),
        ({"include": ["message.output_text.logprobs"]}, "log-probs are not supported"),
        ({"include": 5}, "include must be a list"),
        ({"top_logprobs": 2}, "top_logprobs is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text parts"),
        ({"input": []}, "at least one message"),
        ({"max_output_tokens": -1}, "max_tokens=-1 is not a number"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(more: dict[str, Any], words: str) -> None:
    async def program(scene: Scene) -> None:
        with pytest.raises(openai.BadRequestError, match=words):
            await scene.client().responses.create(**{"model": "any", "input": "x", **more})

    episode, _ = play(Scene([]), program)
    assert not episode.graph.nodes


def test_options_that_ask_for_nothing_more_are_taken() -> None:
    async def program(scene: Scene) -> list[tuple[str, str]]:
        create, kinds = scene.client().responses.create, []
        for choice in ("auto", "required", "none"):
            asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "text": {"format": {"type": "text"}}}
            answer = await create(model="any", input=f"{choice}?", **asked)
            kinds.append((answer.tool_choice, answer.output[0].type))
        return kinds

    _, kinds = play(Scene([CALL] * 3), program)
    assert kinds == [("auto", "function_call"), ("required", "function_call"), ("none", "message")]


KINDS = st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "input_text", "function"])
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
NAMES = st.sampled_from(["type", "role", "content", "text", "name", "arguments", "function"])
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | KINDS,
    lambda own: st.lists(own, max_size=2) | st.dictionaries(NAMES, own, max_size=3),
    max_leaves=5,
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES | ODD, "content": KINDS | ODD},
        optional={"type": KINDS | ODD, "tool_calls": ODD, "output": ODD, "summary": ODD, "tool_call_id": ODD},
    ),
    min_size=1,
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {"input": ITEMS | KINDS | ODD, "messages": ITEMS | ODD},
    optional=dict.fromkeys(("tools", "instructions", "previous_response_id", "stop", "max_tokens", "n", "text"), ODD),
)


@pytest.mark.covering(0)
@pytest.mark.parametrize("read", [dict, lambda body: as_chat_request(body, {}, {})], ids=["completions", "responses"])
def test_any_body_is_a_request_or_refused(read: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    answered = []

    @settings(max_examples=300, deadline=None)
    @given(BODIES)
    @example({"input": "x", "messages": [{"role": "user", "content": "x", "tool_calls": 1}]})
    def check(body: dict[str, Any]) -> None:
        with suppress(RequestRefused):
            question = ChatQuestion.parse(read(body))
            answered.append((question.messages[-1]["role"], question.digest))

    check()
    assert answered
    assert {role for role, _ in answered} <= {"system", "user", "assistant", "tool"}


def test_a_proxy_with_a_key_of_its_own_passes_an_episodes_key_on_as_user() -> None:
    async def program(scene: Scene) -> None:
        client = scene.client(api_key="of the proxy")
        await client.responses.create(model="any", input="Where?", user=scene.key)
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "?"}], user=scene.key)
        with pytest.raises(openai.AuthenticationError):
            await client.responses.create(model="any", input="Where?", user="rlpipe-other")
        async with aiohttp.ClientSession() as http:
            for header in ("Bearer \u00e9", "Bearer rlpipe-\udcff-0", ""):
                request = http.post(
                    f"{scene.gateway.base_url}/responses", json={"user": "\udcff"}, headers={"Authorization": header}
                )
                async with request as response:
                    assert response.status == 401
        scene.gateway.close(scene.key)
        with pytest.raises(openai.ConflictError):
            await client.responses.create(model="any", input="Where?", user=scene.key)

    episode, _ = play(Scene(["North.", "East."]), program)
    assert len(episode.graph.turns) == 2
