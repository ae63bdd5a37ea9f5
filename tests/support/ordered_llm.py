"""A stand-in for vLLM's engine class that insists on an order of calls."""

from types import SimpleNamespace
from typing import Any

from rollout_models import EOS


class OrderedLLM:
    """vllm.LLM's methods as the engine uses them; AssertionError for one out of order, as a GPU would run out of memory
    or compute with memory that is gone."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.calls = settings, []
        self.weights, self.cache, self.version, self.dirty = True, True, "", True
        self.llm_engine = SimpleNamespace(
            engine_core=SimpleNamespace(shutdown=lambda: None, get_output=lambda: None),
            abort_request=lambda *_, **__: None,
            output_processor=SimpleNamespace(request_states={}),
        )

    def generate(self, prompts: Any, params: Any, *, use_tqdm: bool, lora_request: Any) -> list[Any]:
        assert self.weights
        assert bool(lora_request) == ("load_adapters" in self.calls)
        assert self.cache
        assert not self.dirty, "generating with weights that were never loaded, or keys of old ones"
        self.calls.append("generate")
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(finish_reason="stop", token_ids=[EOS], logprobs=SimpleNamespace(logprobs=[-1.0]))
                ]
            )
            for _ in prompts
        ]

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        assert level == (1 if "enable_lora" in self.settings else 2), "what no push brings must not be dropped"
        assert self.weights
        assert self.cache
        self.weights = self.cache = False
        self.dirty = True
        self.calls.append("sleep")

    def wake_up(self, tags: list[str] | None = None) -> bool:
        assert tags in (["weights"], ["kv_cache"])
        if tags == ["weights"]:
            assert not self.weights
            assert not self.cache
            self.weights = True
        else:
            assert self.calls[-1] in ("finish", "load_adapters"), "the cache comes back after the weights are loaded"
            self.cache = True
        self.calls.append(f"wake_up {tags[0]}")
        return self.weights and self.cache

    def init_weight_transfer_engine(self, request: Any) -> None:
        assert set(request) == {"init_info"}
        self.shapes = request["init_info"]["shapes"]

    def start_weight_update(self) -> None:
        assert self.weights, "loading into weights that are asleep"
        self.calls.append("start")

    def update_weights(self, request: Any) -> None:
        assert self.calls[-1] == "start"
        came = {name: weight.shape for name, weight in request["update_info"]["weights"]}
        assert came == self.shapes
        self.calls.append("update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert self.calls[-1] == "update"
        assert weight_version is None, "the version says that the cache of keys is new, too"
        self.calls.append("finish")

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> None:
        """Our worker's methods."""
        assert self.weights, "loading into weights that are asleep"
        if method == "expect_adapters":
            (adapters,) = args
            self.shapes = adapters.shapes
            return
        assert {name: weight.shape for name, weight in kwargs["weights"]} == self.shapes
        self.calls.append(method)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        assert reset_connector, "older keys outside of the GPU"
        assert self.cache, "resetting a cache that is asleep"
        self.dirty = False
        self.calls.append("reset_prefix_cache")
        return True

    def update_weight_version(self, new_version: str) -> None:
        self.version = new_version

    def get_weight_version(self) -> str:
        return self.version
