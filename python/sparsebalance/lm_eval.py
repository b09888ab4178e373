"""Our engine under the LM evaluation harness (lm_eval), dense or with the attention that a model was trained with.

`python -m sparsebalance.lm_eval` is the harness's own command line with the model `sparsebalance` in it:

    python -m sparsebalance.lm_eval --model sparsebalance --model_args pretrained=runs/a/final,attention=as-trained \
        --tasks hellaswag

The tokens are those of transformers' tokenizer, as with the harness's `hf`; the model runs in the command line tool
(`sparsebalance eval serve`), which is asked line by line.
"""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import transformers
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text, resolve_max_length
from tqdm import tqdm

from sparsebalance import UserError
from sparsebalance._program import PROGRAM, environment


class _Engine:
    """`sparsebalance eval serve`: requests and answers, one JSON object a line."""

    def __init__(self, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            [os.fspath(PROGRAM), "eval", "serve", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.about = self._read()

    def ask(self, request: dict[str, Any], goes_on: Callable[[int, int], bool] | None = None) -> dict[str, Any]:
        """The answer; every token on the way to it is shown to `goes_on(prompt, token)`."""
        self._write(request)
        while "token" in (answer := self._read()):
            self._write(goes_on(answer["prompt"], answer["token"]))
        return answer

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _write(self, value: Any) -> None:
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._ended()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(answer["error"])
        return answer

    def _ended(self) -> NoReturn:
        raise UserError(f"sparsebalance eval serve ended with code {self._process.wait()}; what it wrote above says why")


@register_model("sparsebalance")
class SparseBalanceLM(TemplateLM):
    """model_args: pretrained (a Hugging Face directory), attention (dense, as-trained), run_config, adapter, device (cpu,
    cuda), precision (auto, float32), max_length, batch_size (prompts that are continued together), threads,
    max_gen_toks, add_bos_token."""

    def __init__(
        self,
        pretrained: str,
        attention: str = "dense",
        run_config: str | None = None,
        adapter: str | None = None,
        device: str = "cpu",
        precision: str = "auto",
        max_length: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        threads: int = 0,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
    ) -> None:
        super().__init__()
        try:
            batch = int(batch_size)
        except ValueError:
            raise UserError(f"batch_size={batch_size}: must be a number of prompts that are continued together") from None
        if str(device).startswith("cuda") and str(device) not in ("cuda", "cuda:0"):
            raise UserError(
                f"device={device}: the engine runs on the first GPU that it sees; choose one by the environment, "
                "CUDA_VISIBLE_DEVICES=1, with device=cuda"
            )
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
        config = transformers.AutoConfig.from_pretrained(pretrained)
        self.max_length = int(max_length or resolve_max_length(config, self.tokenizer))
        self.max_gen_toks = max_gen_toks
        self.batch_size = batch
        self.add_bos_token = add_bos_token
        arguments = ["--model", str(pretrained), "--attention", attention, "--precision", precision]
        arguments += ["--device", "cuda" if str(device).startswith("cuda") else str(device)]
        arguments += ["--max-tokens", str(self.max_length), "--batch", str(batch), "--threads", str(threads)]
        for option, value in (("--run-config", run_config), ("--adapter", adapter)):
            if value is not None:
                arguments += [option, str(value)]
        self._engine = _Engine(arguments)

    def close(self) -> None:
        self._engine.close()

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return bos if bos is not None else self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        options = {}
        prefix = self.tokenizer.decode([self.prefix_token_id])
        if add_special_tokens is not None:
            options["add_special_tokens"] = add_special_tokens
        elif prefix and string.startswith(prefix):
            options["add_special_tokens"] = False  # a chat template has put it there
        elif self.add_bos_token is not None:
            options["add_special_tokens"] = self.add_bos_token
        return self.tokenizer.encode(string, **options)

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        # As with `hf`: what does not fit loses its beginning; the last token is no input.
        tokens = (context + continuation)[-(self.max_length + 1) :]
        if len(continuation) >= len(tokens):
            raise UserError(f"a continuation of {len(continuation)} tokens, but max_length is {self.max_length}; raise it")
        answer = self._engine.ask({"score": {"tokens": tokens, "targets": len(continuation)}})
        if answer["loglikelihood"] is None:
            raise UserError("the model's loss is not a finite number")
        return answer["loglikelihood"], answer["greedy"]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        results = []
        for key, context, continuation in tqdm(requests, desc="Running loglikelihood requests", disable=disable_tqdm):
            results.append(self._score(context, continuation))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, results[-1])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        results = []
        for (text,) in tqdm([request.args for request in requests], disable=disable_tqdm):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            results.append(sum(self._score(*utils.make_disjoint_window(window))[0] for window in windows))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), results[-1])
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        asked = [request.args for request in requests]
        # Prompts with the same options run together.
        alike: dict[str, list[int]] = {}
        for place, (_, options) in enumerate(asked):
            alike.setdefault(json.dumps(options, sort_keys=True), []).append(place)
        results: list[str] = [""] * len(asked)
        with tqdm(total=len(asked), desc="Running generate_until requests", disable=disable_tqdm) as progress:
            for places in alike.values():
                for begin in range(0, len(places), self.batch_size):
                    batch = places[begin : begin + self.batch_size]
                    texts = self._generate([asked[place][0] for place in batch], asked[batch[0]][1], seed=1 + batch[0])
                    for place, text in zip(batch, texts, strict=True):
                        results[place] = text
                        self.cache_hook.add_partial("generate_until", asked[place], text)
                    progress.update(len(batch))
        return results

    def _generate(self, contexts: list[str], options: dict[str, Any], seed: int) -> list[str]:
        kwargs = normalize_gen_kwargs(options, self.max_gen_toks)
        until = handle_stop_sequences(kwargs.pop("until", None), eos=self.tokenizer.decode([self.eot_token_id]))
        max_new = kwargs.pop("max_gen_toks")
        sampled = kwargs.pop("do_sample", False)
        temperature = kwargs.pop("temperature", 0.0)
        top_p = kwargs.pop("top_p", 1.0)
        if kwargs:
            raise UserError(f"generation options that the engine does not have: {', '.join(sorted(kwargs))}")
        room = self.max_length - max_new
        if room < 1:
            raise UserError(f"answers of {max_new} tokens leave no room for a prompt in max_length {self.max_length}; raise it")
        # A stop sequence is looked for in the last tokens alone: one that it ends in may hold more than its end.
        tail = max(len(self.tokenizer.encode(stop, add_special_tokens=False)) for stop in until) + 2
        so_far: list[list[int]] = [[] for _ in contexts]

        def goes_on(prompt: int, token: int) -> bool:
            so_far[prompt].append(token)
            text = self.tokenizer.decode(so_far[prompt][-tail:])
            return not any(stop and stop in text for stop in until)

        request = {
            "prompts": [self.tok_encode(context)[-room:] for context in contexts],
            "max_new_tokens": max_new,
            "temperature": temperature if sampled else 0.0,
            "top_p": top_p,
            "seed": seed,
        }
        tokens = self._engine.ask({"generate": request}, goes_on)["tokens"]
        return [
            postprocess_generated_text(self.tokenizer.decode(ids, skip_special_tokens=True), until, None) for ids in tokens
        ]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
