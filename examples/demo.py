"""The whole story in one command: a healthy run beside its forecast, and a faulted one that stops at its flag.

    python examples/demo.py                 # two to five minutes on two cores
    python examples/demo.py --fault data    # another fault in the second run: lr (default), data or nan

Both runs train at once, one thread each, so that neither core ever waits for the other. What the second one says is
printed when the first is done.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = Path(__file__).resolve().parent / "train_lightning.py"


def command(fault: str) -> list[str]:
    """The command line of one run."""
    return [sys.executable, str(TRAIN), "--fault", fault, "--threads", "1"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=("lr", "data", "nan"), default="lr")
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        faulted = subprocess.Popen(command(args.fault), stdout=said, stderr=subprocess.STDOUT, text=True)
        try:
            print("\n=== A healthy run ===\n", flush=True)
            healthy_code = subprocess.run(command("none")).returncode
            faulted_code = faulted.wait()
        finally:
            faulted.kill()
        said.seek(0)
        print(f"\n=== The same run with a fault at half of training: {args.fault} ===\n\n{said.read()}")
    print(f"Both runs took {(time.monotonic() - started) / 60:.1f} minutes. See them: tensorboard --logdir runs")
    return healthy_code or faulted_code


if __name__ == "__main__":
    sys.exit(main())
