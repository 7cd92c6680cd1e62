"""A command of vasuki as a task of Airflow, for your own DAGs too."""

from __future__ import annotations

import json
import os
from typing import Any

from airflow.providers.standard.hooks.subprocess import SubprocessHook
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

RETRIES_DO_NOT_HELP = (1, 2, 3, 4)  # docs/operations.md


class VasukiOperator(BaseOperator):
    """Runs a command of vasuki, and returns what it prints as JSON.

    A run that was interrupted (75), found its output locked (5) or was killed is retried as the DAG says, and goes on
    with the missing rows. Every other failure is final.
    """

    template_fields = ("arguments",)

    def __init__(self, *, arguments: list[str], **settings: Any) -> None:
        super().__init__(**settings)
        self.arguments = arguments
        self.process = SubprocessHook()

    def execute(self, context: Any) -> Any:
        command = [os.environ.get("VASUKI", "vasuki"), *self.arguments, "--json"]
        ended = self.process.run_command(command, env={**os.environ, "VASUKI_RUN_ID": context["run_id"]})
        if ended.exit_code in RETRIES_DO_NOT_HELP:
            raise AirflowFailException(f"exit code {ended.exit_code}: {ended.output}")
        if ended.exit_code:
            raise AirflowException(f"exit code {ended.exit_code}: {ended.output}")
        return json.loads(ended.output)  # the last line

    def on_kill(self) -> None:
        """Let a run that Airflow stops commit its finished rows."""
        self.process.send_sigterm()
