import pytest
from helpers import stand_in_gcloud as recorded

from levanter.infra.tpu_vm import classify_error, worker_codes

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (recorded.STOCKOUT, "capacity"),
        (recorded.RESERVED, "capacity"),
        (recorded.QUOTA, "quota"),
        # Worded as a quota, but it passes by itself.
        (recorded.RATE, "transient"),
        (recorded.OFFLINE, "transient"),
        (recorded.DENIED, "other"),
        (recorded.PREEMPTED_WHILE_MADE, "preempted"),
        (recorded.NOT_FOUND, "not_found"),
        (recorded.DROPPED, "ssh"),
        (recorded.UNUSABLE, "preempted"),
        (
            "Quota 'TPUV4sPreemptiblePodPerProjectPerRegionForTPUAPI' exhausted. Limit 20800 in region us-central2",
            "quota",
        ),
        ("code: ZONE_RESOURCE_POOL_EXHAUSTED\nmessage: The zone does not have enough resources available", "capacity"),
        ("ERROR: (gcloud.compute.tpus.tpu-vm.create) UNAVAILABLE: The service is currently unavailable.", "transient"),
        ('{"code": 13, "message": "an internal error has occurred"}', "transient"),
        ("ERROR: (gcloud.compute.tpus.tpu-vm.create) unrecognized arguments: --internal-ips=3", "other"),
        ("", "other"),
    ],
)
def test_recorded_errors_of_gcloud(text, meaning):
    assert classify_error(text.format(name="books", zone="us-east5-b") if "{zone}" in text else text) == meaning


def test_codes_of_the_hosts():
    text = (
        "##### Command execution on worker 3 failed with exit status 2. Continuing.\n"
        "[1] a line of the run\n##### Command execution on worker 12 failed with exit status 5. Continuing.\n"
    )
    assert worker_codes(text) == {3: 2, 12: 5}
    assert worker_codes("all went well") == {}
