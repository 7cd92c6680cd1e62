"""A job every night: check and plan it, run it until it is done, and report.

Put this file and `vasuki_operator.py` into Airflow's DAG folder, and `vasuki` into an environment of its own, since
their dependencies differ; the variable VASUKI names the command if it is not on the PATH. The run's manifest goes
through XCom, rows never do.
"""

from __future__ import annotations

import os
from datetime import timedelta

from airflow.sdk import DAG, Param
from vasuki_operator import VasukiOperator

with DAG(
    "vasuki",
    schedule="@daily",
    catchup=False,
    max_active_runs=1,
    params={"job": Param("/srv/batch/nightly.yaml", type="string")},
    default_args={"retries": 20, "retry_delay": timedelta(seconds=int(os.environ.get("VASUKI_RETRY_DELAY_S", "60")))},
):
    check = VasukiOperator(task_id="check", arguments=["check", "{{ params.job }}"])
    plan = VasukiOperator(task_id="plan", arguments=["plan", "{{ params.job }}"])
    run = VasukiOperator(task_id="run", arguments=["run", "{{ params.job }}"])
    report = VasukiOperator(
        task_id="report", arguments=["report", "{{ ti.xcom_pull(task_ids='run')['job']['output']['path'] }}"]
    )
    check >> plan >> run >> report
