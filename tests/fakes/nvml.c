/*
 * The part of NVIDIA's management library that the gateway asks, for machines without a GPU.
 *
 * Built as libnvidia-ml.so.1 by tests/fakes/nvml.py and loaded by the real nvidia-ml-py. What it
 * says stands in the file that FAKE_NVML names, read anew at every call:
 *
 *     device UUID TOTAL USED MIG NAME    bytes; MIG is 0 or 1; the first line is GPU 0
 *     process GPU PID BYTES              -1: the driver does not tell how much
 *     fault FUNCTION GPU CODE            what a function answers instead; GPU -1: of any GPU
 *     hang FUNCTION                      it does not return while this line stands there
 *
 * Without the file, or with an empty one, there is no driver. As in NVML, nothing but nvmlInit and
 * nvmlErrorString answers before nvmlInit, and a list that is too short is answered with the
 * length it should have. OLD_DRIVER leaves out what drivers before 510 do not have.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    MAX_DEVICES = 16,
    MAX_PROCESSES = 64,
    ANY_GPU = -1,
};

typedef unsigned long long bytes;
typedef struct { bytes total, free, used; } memory;
typedef struct { unsigned pid; bytes used; unsigned gpu_instance, compute_instance; } process;

struct device { char uuid[96], name[96]; bytes total, used; int mig; };
struct state {
    int devices, processes;
    struct device device[MAX_DEVICES];
    struct { int gpu; process of; } process[MAX_PROCESSES];
};

static int initialised;

/* Read the file; return the answer that it prescribes for `function`, or SUCCESS. */
static int look(struct state *state, const char *function, int gpu) {
    char line[512], name[96];
    int code = SUCCESS, hanging, of, found;
    do {
        const char *path = getenv("FAKE_NVML");
        FILE *file = path ? fopen(path, "r") : NULL;
        memset(state, 0, sizeof *state);
        hanging = 0;
        while (file && fgets(line, sizeof line, file)) {
            struct device *device = &state->device[state->devices];
            process *listed = &state->process[state->processes].of;
            if (state->devices < MAX_DEVICES &&
                sscanf(line, "device %95s %llu %llu %d %95[^\n]", device->uuid, &device->total,
                       &device->used, &device->mig, device->name) == 5)
                state->devices++;
            else if (state->processes < MAX_PROCESSES &&
                     sscanf(line, "process %d %u %lld", &state->process[state->processes].gpu,
                            &listed->pid, (long long *)&listed->used) == 3)
                state->processes++;
            else if (sscanf(line, "fault %95s %d %d", name, &of, &found) == 3) {
                if (!strcmp(name, function) && (of == ANY_GPU || of == gpu)) code = found;
            } else if (sscanf(line, "hang %95s", name) == 1)
                hanging |= !strcmp(name, function);
        }
        if (file) fclose(file);
        if (hanging) usleep(10000);
    } while (hanging);
    return code;
}

/* What every question about a GPU begins with; a handle is its index plus one. */
static int ask(struct state *state, const char *function, void *handle) {
    int gpu = (int)(size_t)handle - 1;
    int code = look(state, function, gpu);
    if (!initialised) return UNINITIALIZED;
    if (code != SUCCESS) return code;
    return gpu < 0 || gpu >= state->devices ? INVALID_ARGUMENT : SUCCESS;
}

static int put(char *target, unsigned room, const char *text) {
    if (strlen(text) >= room) return INSUFFICIENT_SIZE;
    strcpy(target, text);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    struct state state;
    int code = look(&state, "nvmlInit", ANY_GPU);
    (void)flags;
    if (code != SUCCESS) return code;
    if (!state.devices) return DRIVER_NOT_LOADED;
    initialised = 1;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    struct state state;
    int code = look(&state, "nvmlDeviceGetCount", ANY_GPU);
    if (!initialised) return UNINITIALIZED;
    *count = (unsigned)state.devices;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    struct state state;
    int code = ask(&state, "nvmlDeviceGetHandleByIndex", (void *)(size_t)(index + 1));
    if (code == SUCCESS) *handle = (void *)(size_t)(index + 1);
    return code;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned room) {
    struct state state;
    int code = ask(&state, "nvmlDeviceGetUUID", handle);
    return code == SUCCESS ? put(uuid, room, state.device[(size_t)handle - 1].uuid) : code;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned room) {
    struct state state;
    int code = ask(&state, "nvmlDeviceGetName", handle);
    return code == SUCCESS ? put(name, room, state.device[(size_t)handle - 1].name) : code;
}

int nvmlDeviceGetMemoryInfo(void *handle, memory *info) {
    struct state state;
    int code = ask(&state, "nvmlDeviceGetMemoryInfo", handle);
    if (code != SUCCESS) return code;
    info->total = state.device[(size_t)handle - 1].total;
    info->used = state.device[(size_t)handle - 1].used;
    info->free = info->total - info->used;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    struct state state;
    int code = ask(&state, "nvmlDeviceGetMigMode", handle);
    if (code != SUCCESS) return code;
    *current = *pending = (unsigned)state.device[(size_t)handle - 1].mig;
    return SUCCESS;
}

static int list(void *handle, unsigned *count, process *listed) {
    struct state state;
    unsigned room = *count;
    int code = ask(&state, "nvmlDeviceGetComputeRunningProcesses", handle);
    if (code != SUCCESS) return code;
    *count = 0;
    for (int i = 0; i < state.processes; i++)
        if (state.process[i].gpu == (int)(size_t)handle - 1) {
            if (listed && *count < room) listed[*count] = state.process[i].of;
            ++*count;
        }
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, process *listed) {
    return list(handle, count, listed);
}

#ifndef OLD_DRIVER
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process *listed) {
    return list(handle, count, listed);
}
#endif
