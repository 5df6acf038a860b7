"""Checks the arguments of the Python API (docs/api.md).

The API shares code with the verbs of the command line, whose messages name options such as `--max-new-tokens`. The
decorator `python_call` rewrites these to arguments such as `max_new_tokens`.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from glm46.config.errors import UserError
from glm46.config.faults import counted, nearest

_MAX_VALUE_CHARACTERS = 60
_OPTION = re.compile(r"--([a-z][a-z-]*[a-z])")
_NAMES_ELSEWHERE = {
    "max_length": "max_new_tokens",
    "max_new": "max_new_tokens",
    "temp": "temperature",
    "model": "folder",
}
"""Names in other libraries -> our names, where the two are not similar."""

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def python_call(**arguments: str) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Return a decorator: the function refuses unknown keyword arguments, and its messages name arguments, not options.

    Args:
        arguments: option without "--" -> name of the argument, where the two differ by more than "-" and "_".
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        parameters = list(inspect.signature(function).parameters)
        names = [name for name in parameters if name != "self"]

        @functools.wraps(function)
        def call(*positional: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
            for name in named:
                if name not in names:
                    raise UserError(_unknown_argument(function.__name__, name, names))
            try:
                return function(*positional, **named)
            except UserError as error:
                values = dict(named)
                values.update(zip(parameters, positional, strict=False))
                faults = [_in_python(fault, names, arguments, values) for fault in error.faults]
                raise type(error)(*faults) from error

        return call

    return decorate


def _unknown_argument(function: str, name: str, names: Sequence[str]) -> str:
    similar = _NAMES_ELSEWHERE.get(name)
    if similar not in names:
        similar = nearest(name, names, 0.55)
    remedy = f"use {similar}" if similar else f"take one of {', '.join(names)}"
    return f"{name}: {function}() has no such argument; {remedy}"


def _in_python(fault: str, names: Sequence[str], arguments: Mapping[str, str], values: Mapping[str, object]) -> str:
    """Rewrite the options in a message to arguments. Options without an argument stay as they are.

    A message that begins with "--option value" then begins with "argument = value", in Python's notation.

    Args:
        names: all arguments of the function.
        arguments: see `python_call`.
        values: the arguments of this call.
    """

    def argument_or_option(match: re.Match[str]) -> str:
        option: str = match[0]
        name = arguments.get(match[1], match[1].replace("-", "_"))
        return name if name in names else option

    first = _OPTION.match(fault)
    if first and (name := argument_or_option(first)) in names:
        rest = fault[first.end() :]
        for value in (repr(values.get(name)), str(values.get(name))):
            if rest.startswith(f" {value}"):
                fault = f"{name} = {show_value(values[name])}{rest[1 + len(value) :]}"
                break
    return _OPTION.sub(argument_or_option, fault)


def show_value(value: object) -> str:
    """Return a value as Python writes it, on one line and cut to a length that fits in a message."""
    text = " ".join(repr(value).split())
    if len(text) <= _MAX_VALUE_CHARACTERS:
        return text
    return f"{text[: _MAX_VALUE_CHARACTERS - 3]}..."


def token_ids(ids: object, *, vocab_size: int, max_tokens: int | None = None, is_empty_allowed: bool = False) -> Tensor:
    """Check token ids, and return them as a tensor, int64 [S] or [B, S], on the CPU.

    Args:
        ids: a list or tuple of integers, or of rows of equal length; a NumPy array, or a tensor.
        vocab_size: ids must be smaller.
        max_tokens: limit for the length of a row.
        is_empty_allowed: True if there may be no ids.

    Raises:
        UserError: `ids` has another type or shape, or an id or the length is out of range.
    """
    if isinstance(ids, str):
        raise UserError(f"ids = {show_value(ids)}: must be token ids, not a text; give encode(text)")
    tensor = _integers(ids)
    if tensor.ndim not in (1, 2):
        remedy = "give a list such as [1, 2]" if tensor.ndim == 0 else "give one row [S], or rows [B, S]"
        raise UserError(f"ids = {show_value(ids)}: must have 1 or 2 dimensions, not {tensor.ndim}; {remedy}")
    if tensor.numel() == 0:
        if is_empty_allowed:
            return tensor.long()
        raise UserError(f"ids = {show_value(ids)}: must not be empty; give at least one token id in each row")
    for edge in (int(tensor.min()), int(tensor.max())):
        if not 0 <= edge < vocab_size:
            raise UserError(
                f"ids: {edge} is not a token id: ids must be from 0 to {vocab_size - 1:,}; take ids of encode(text)"
            )
    length = tensor.shape[-1]
    if max_tokens is not None and length > max_tokens:
        raise UserError(
            f"ids: a row has {counted(length, 'token')}, and the model has {max_tokens:,} positions "
            "(max_position_embeddings); give shorter rows"
        )
    return tensor.long()


def _integers(ids: object) -> Tensor:
    """Return a sequence, array or tensor of integers as a tensor. Raises UserError for other types."""
    remedy = "give a list of integers, lists of equal length, a NumPy array or a tensor"
    fault = f"ids = {show_value(ids)}: must be integers; {remedy}"
    if isinstance(ids, Tensor):
        tensor = ids.detach().cpu()
    elif isinstance(ids, (list, tuple, range, np.ndarray, np.integer, int)):
        if isinstance(ids, (list, tuple)):
            ids = [_plain(row) for row in ids]
        try:
            array = np.asarray(ids)
        except (ValueError, TypeError, OverflowError):  # rows of several lengths
            raise UserError(fault) from None
        if array.size == 0:
            return torch.zeros(array.shape, dtype=torch.int64)
        if array.dtype.kind not in "iu" or array.dtype == np.uint64:
            raise UserError(fault)
        tensor = torch.from_numpy(array.astype(np.int64))
    else:
        raise UserError(fault)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise UserError(fault)
    return tensor


def _plain(row: object) -> object:
    """Return a row that NumPy can stack: tensors become arrays."""
    return row.detach().cpu().numpy() if isinstance(row, Tensor) else row


def texts(prompts: object, *, is_chat: bool) -> list[str]:
    """Check the prompts of a call, a text or several, and return them as a list.

    Raises:
        UserError: there is no prompt, or one is empty or not a text.
    """
    if isinstance(prompts, str):
        rows: list[object] = [prompts]
        names: Iterator[str] = iter(["prompts"])
    elif isinstance(prompts, Sequence) and not isinstance(prompts, (bytes, bytearray)):
        rows = list(prompts)
        names = (f"prompts[{number}]" for number in range(len(rows)))
    else:
        raise UserError(f"prompts = {show_value(prompts)}: must be a text or a list of texts; for ids give decode(ids)")
    if not rows:
        raise UserError("prompts = []: must not be empty; give at least one text")
    faults = []
    for name, row in zip(names, rows, strict=True):
        if isinstance(row, Mapping):
            remedy = "give the text of the user's message with chat=True, and system= for a system message"
            faults.append(f"{name} = {show_value(row)}: must be a text; {remedy}")
        elif not isinstance(row, str):
            faults.append(f"{name} = {show_value(row)}: must be a text; for ids give decode(ids)")
        elif not row or (is_chat and not row.strip()):
            faults.append(f"{name} = {row!r}: must not be empty; give some text")
    if faults:
        raise UserError(faults[0])
    return [str(row) for row in rows]


def require_type(name: str, value: object, types: type | tuple[type, ...], rule: str) -> None:
    """Raise a UserError unless a value has one of these types. A bool does not count as an int."""
    kinds = types if isinstance(types, tuple) else (types,)
    is_unwanted_bool = isinstance(value, bool) and bool not in kinds
    if not isinstance(value, kinds) or is_unwanted_bool:
        raise UserError(f"{name} = {show_value(value)}: must be {rule}")
