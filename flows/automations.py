"""Create or renew the automations in automations/ on the configured Prefect server.

The files are what `prefect automation create --from-file` takes, but for one thing: a `run-deployment` action
names its deployment, and not an id that differs on every server.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound

from tasks.cli import run_main
from tasks.params import PROJECT_ROOT, ParamsError, read_yaml

FOLDER = PROJECT_ROOT / "automations"


def install(folder: Path = FOLDER, notify: str | None = None) -> list[str]:
    """Create each automation, or renew the one of the same name. Returns the names.

    One that was switched off stays off, and notifications of an earlier call stay unless others are named.

    Args:
        folder: of the YAML files.
        notify: a notification block as `type/name`, e.g. `slack-webhook/team`: each automation uses it too.

    Raises:
        ParamsError: a deployment or the block is not on the server.
    """
    names = []
    with get_client(sync_client=True) as client:
        block = None if notify is None else _block_id(client, notify)
        for file in sorted(folder.glob("*.yaml")):
            content = read_yaml(file)
            content["actions"] = [_with_id(client, file, action) for action in content["actions"]]
            if block is not None:
                content["actions"].append(_notification(content["name"], content["description"], block))
            automation = AutomationCore.model_validate(content)
            found = client.read_automations_by_name(automation.name)
            if found:
                client.update_automation(found[0].id, _renewed(automation, found[0], block is not None))
            else:
                client.create_automation(automation)
            names.append(automation.name)
    return names


def _renewed(automation: AutomationCore, older: AutomationCore, notified_anew: bool) -> AutomationCore:
    kept = [] if notified_anew else [each for each in older.actions if each.type == "send-notification"]
    return automation.model_copy(update={"enabled": older.enabled, "actions": [*automation.actions, *kept]})


def _with_id(client: SyncPrefectClient, file: Path, action: dict[str, Any]) -> dict[str, Any]:
    """The action with its deployment's id in place of its name."""
    if "deployment" not in action:
        return action
    name = action["deployment"]
    try:
        deployment = client.read_deployment_by_name(name)
    except ObjectNotFound:
        raise ParamsError(f"{file}: no deployment {name} on the server; deploy it first: `make up`") from None
    rest = {key: value for key, value in action.items() if key != "deployment"}
    return {**rest, "deployment_id": str(deployment.id)}


def _block_id(client: SyncPrefectClient, notify: str) -> UUID:
    kind, _, name = notify.partition("/")
    try:
        return client.read_block_document_by_name(name, kind).id
    except ObjectNotFound:
        raise ParamsError(
            f"--notify: no block {notify} on the server; `prefect block ls` lists them"
        ) from None


def _notification(name: str, about: str, block: UUID) -> dict[str, Any]:
    return {
        "type": "send-notification",
        "block_document_id": str(block),
        "subject": name,
        "body": f"{about}\n{{{{ flow_run.name }}}} {{{{ flow_run|ui_url }}}}",
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.automations",
        description="Create or renew the automations in automations/ on the Prefect server.",
        epilog="Example: python -m flows.automations --notify slack-webhook/team",
    )
    parser.add_argument("--notify", metavar="TYPE/NAME", help="notification block to use in each of them")
    for name in install(notify=parser.parse_args().notify):
        print(f"automation {name}")


if __name__ == "__main__":
    run_main(main)
