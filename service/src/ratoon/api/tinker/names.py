"""Names of the Tinker wire: sessions, models and paths of weights, each with its owner.

A session's id begins with the id of the key that made it, a model's with its session's, and a
path's with its model's. So whose anything is follows from its name alone, in every process and
after any restart; a name of another key is refused with the text for one that is unknown.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from dataclasses import dataclass

from ratoon.api.convert.checks import CHECKPOINT_ID
from ratoon.errors import ErrorCode, RatoonError, invalid, shown

# The owner of what is made without a key; no key has this id.
NOBODY = "0" * 12
_SCHEME = "tinker://"
_SESSION_FORM = "[0-9a-f]{12}-[0-9a-f]{16}"
_SESSION = re.compile(_SESSION_FORM)
_MODEL = re.compile(f"({_SESSION_FORM}):train:(0|[1-9][0-9]{{0,5}})")
_POLICY = re.compile(f"tinker-({_SESSION_FORM})-(0|[1-9][0-9]{{0,5}})")
_SAMPLER = re.compile(f"({_SESSION_FORM}(?::train:[0-9]+)?):sample:([a-zA-Z0-9._=-]{{1,400}})")
# Kind of a path of weights to sample from.
SAMPLER_WEIGHTS = "sampler_weights"
# Begins the names of versions that a script samples from without having named them.
UNNAMED = "unnamed-"
# The name that a model's `inflight` saves take over, one from the other.
INFLIGHT = f"{UNNAMED}inflight"
# Stands for a model's newest weights in a sampling session's id; no version has this name.
_NEWEST = "="
_TEXTS = {
    ErrorCode.POLICY_NOT_FOUND: "there is no such session or model for this key",
    ErrorCode.OPERATION_NOT_FOUND: "there is no such future for this key",
    ErrorCode.CHECKPOINT_NOT_FOUND: "there are no such weights for this key",
    ErrorCode.WEIGHTS_NOT_FOUND: "there are no such weights for this key",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of a session, by its number there."""

    session: str
    number: int

    @property
    def model_id(self) -> str:
        return f"{self.session}:train:{self.number}"

    @property
    def policy_id(self) -> str:
        return f"tinker-{self.session}-{self.number}"

    @property
    def newest(self) -> str:
        """The path of the weights that the model has whenever they are asked for."""
        return f"{_SCHEME}{self.model_id}"

    def path(self, name: str, kind: str = "weights") -> str:
        """Return the path of the weights that are saved under `name`."""
        return f"{self.newest}/{kind}/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """What a sampling session samples from: a model's version by its `name`, or a base model.

    `name` "" with a model: the weights that the model has when it is sampled. The id says all of
    it, so that no session is kept anywhere.
    """

    session: str
    model: Model | None = None
    name: str = ""
    base_model: str = ""

    @property
    def path(self) -> str | None:
        """Path of what is sampled; None: it has none."""
        if self.model is None or self.name.startswith(UNNAMED):
            return None
        return self.model.path(self.name, SAMPLER_WEIGHTS) if self.name else self.model.newest

    @property
    def sampler_id(self) -> str:
        if self.model is not None:
            return f"{self.model.model_id}:sample:{self.name or _NEWEST}"
        text = base64.urlsafe_b64encode(self.base_model.encode()).decode()
        return f"{self.session}:sample:{text}"


def not_found(code: ErrorCode) -> RatoonError:
    """Return the error for what does not exist, or belongs to another key."""
    return RatoonError(code, _TEXTS[code])


def as_unknown(error: RatoonError) -> RatoonError:
    """Return `error`, or if it says that something does not exist the error of `not_found`."""
    return not_found(error.code) if error.code in _TEXTS else error


def new_session(owner: str) -> str:
    return f"{owner}-{secrets.token_hex(8)}"


def checked_session(session: str, owner: str) -> str:
    """Return a session's id. Raises POLICY_NOT_FOUND unless it can be one of the owner's."""
    if _SESSION.fullmatch(session) is None or not session.startswith(owner):
        raise not_found(ErrorCode.POLICY_NOT_FOUND)
    return session


def model_of(model_id: str, owner: str) -> Model:
    """Read a model's id. Raises POLICY_NOT_FOUND unless it can be one of the owner's."""
    return _owned(_MODEL.fullmatch(model_id), owner)


def model_of_policy(policy_id: str, owner: str) -> Model:
    """Return the model that a policy is. Raises as `model_of`, also for a policy that is none."""
    return _owned(_POLICY.fullmatch(policy_id), owner)


def _owned(match: re.Match[str] | None, owner: str) -> Model:
    if match is None or not match[1].startswith(owner):
        raise not_found(ErrorCode.POLICY_NOT_FOUND)
    return Model(session=match[1], number=int(match[2]))


def is_owned(policy_id: str, owner: str) -> bool:
    """Return whether a policy is a model of the owner's."""
    match = _POLICY.fullmatch(policy_id)
    return match is not None and match[1].startswith(owner)


def sampler_of(sampler_id: str, owner: str) -> Sampler:
    """Read a sampling session's id. Raises POLICY_NOT_FOUND unless it can be the owner's."""
    match = _SAMPLER.fullmatch(sampler_id)
    if match is None:
        raise not_found(ErrorCode.POLICY_NOT_FOUND)
    if ":" in match[1]:
        model = model_of(match[1], owner)
        name = "" if match[2] == _NEWEST else match[2]
        return Sampler(session=model.session, model=model, name=name)
    session = checked_session(match[1], owner)
    try:
        base = base64.b64decode(match[2], altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as err:
        raise not_found(ErrorCode.POLICY_NOT_FOUND) from err
    return Sampler(session=session, base_model=base)


def sampler_at(path: str, owner: str) -> Sampler:
    """Read a path to sample from: of a version, or of a model. Raises as `weights_of`."""
    model_id = path.removeprefix(_SCHEME)
    if path.startswith(_SCHEME) and _MODEL.fullmatch(model_id):
        try:
            model = model_of(model_id, owner)
        except RatoonError as err:
            raise not_found(ErrorCode.CHECKPOINT_NOT_FOUND) from err
        return Sampler(session=model.session, model=model)
    model, name = weights_of(path, owner, SAMPLER_WEIGHTS)
    return Sampler(session=model.session, model=model, name=name)


def weights_of(path: str, owner: str, kind: str = "weights") -> tuple[Model, str]:
    """Read a path of saved weights: the model, and the name under which it saved them.

    `kind`: `weights`, or `sampler_weights`. Raises INVALID_ARGUMENT for what is no such path,
    CHECKPOINT_NOT_FOUND for another key's.
    """
    model_id, slash, name = path.removeprefix(_SCHEME).partition(f"/{kind}/")
    has_form = path.startswith(_SCHEME) and slash and CHECKPOINT_ID.fullmatch(name)
    if not has_form or _MODEL.fullmatch(model_id) is None:
        raise invalid("path", shown(path), f"{_SCHEME}MODEL/{kind}/NAME")
    try:
        return model_of(model_id, owner), name
    except RatoonError as err:
        raise not_found(ErrorCode.CHECKPOINT_NOT_FOUND) from err
