"""The bodies of requests and responses."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from everybert.serving import schemas

KINDS = [kind for kind in vars(schemas).values() if isinstance(kind, type) and issubclass(kind, BaseModel)]
SHOWN = [kind for kind in KINDS if "examples" in (kind.model_config.get("json_schema_extra") or {})]


@pytest.mark.parametrize("kind", SHOWN, ids=lambda kind: kind.__name__)
def test_examples_are_what_they_are_examples_of(kind):
    (given,) = kind.model_config["json_schema_extra"]["examples"]
    kind.model_validate(given)


def test_every_request_and_response_has_an_example():
    named = {kind for kind in KINDS if kind.__name__.endswith(("Request", "Response"))}
    bases = {schemas.BaseRequest, schemas.StrictRequest, schemas.TextRequest}
    assert named - bases <= set(SHOWN)


def test_own_endpoints_refuse_unknown_fields_and_others_ignore_them():
    with pytest.raises(ValidationError):
        schemas.FillRequest(text="a", colour="red")
    assert schemas.EmbeddingsRequest(input="a", colour="red").input == "a"
