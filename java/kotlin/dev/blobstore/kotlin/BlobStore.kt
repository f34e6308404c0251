/**
 * The classes of dev.blobstore with Kotlin's habits: arguments with defaults, and calls that suspend where those of Java
 * block. Each function says which call it makes; that one's comment has the errors.
 *
 * A call that has begun goes on to its end if the coroutine is cancelled, because native code cannot be interrupted.
 */
@file:JvmName("BlobStore")

package dev.blobstore.kotlin

import dev.blobstore.AdamW
import dev.blobstore.Adapters
import dev.blobstore.BlobCache
import dev.blobstore.Followed
import dev.blobstore.InstalledRelease
import dev.blobstore.LogicalTensors
import dev.blobstore.MeZO
import dev.blobstore.MergedAdapter
import dev.blobstore.Method
import dev.blobstore.Optimizer
import dev.blobstore.Outputs
import dev.blobstore.PackedStore
import dev.blobstore.Release
import dev.blobstore.ReleaseOptions
import dev.blobstore.Releases
import dev.blobstore.Request
import dev.blobstore.Runners
import dev.blobstore.SGD
import dev.blobstore.Stop
import dev.blobstore.Tensor
import dev.blobstore.TextRunner
import dev.blobstore.TrainingProgram
import java.util.OptionalDouble
import kotlinx.coroutines.CancellationException
import kotlinx.coroutines.CoroutineDispatcher
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.async
import kotlinx.coroutines.coroutineScope
import kotlinx.coroutines.currentCoroutineContext
import kotlinx.coroutines.ensureActive
import kotlinx.coroutines.runBlocking
import kotlinx.coroutines.withContext

private fun Double?.optional(): OptionalDouble = if (this == null) OptionalDouble.empty() else OptionalDouble.of(this)

/** [BlobCache.open]. */
fun openCache(
    vararg paths: String,
    mode: BlobCache.Mode = BlobCache.Mode.PRIVATE,
    base: BlobCache? = null,
    packed: PackedStore? = null,
): BlobCache = BlobCache.open(paths.asList(), mode, base, packed)

/** [PackedStore.open]. */
fun openPackedStore(
    folder: String,
    limit: Long = PackedStore.DEFAULT_LIMIT,
    verify: Boolean = false,
    readAhead: Long = PackedStore.DEFAULT_READ_AHEAD,
): PackedStore = PackedStore.open(folder, limit, verify, readAhead)

/** [Release.open]. */
fun openRelease(
    directory: String,
    data: List<String>? = null,
    packed: PackedStore? = null,
    executorch: String = "1.5",
): Release = Release.open(directory, data, packed, executorch)

/** [LogicalTensors.updateStateDict], which refuses what is incomplete or not finite unless it is told otherwise. */
fun LogicalTensors.updateStateDict(path: String, strict: Boolean = true, finite: Boolean = true): Long =
    updateStateDict(path, strict, finite)

/** [LogicalTensors.updateStateDict], which refuses what is incomplete or not finite unless it is told otherwise. */
fun LogicalTensors.updateStateDict(
    values: Map<String, Tensor>,
    strict: Boolean = true,
    finite: Boolean = true,
): Long = updateStateDict(values, strict, finite)

/** [Adapters.load]. */
fun LogicalTensors.loadAdapter(path: String, strength: Double = 1.0, programScale: Double? = null): Long =
    Adapters.load(this, path, programScale.optional(), strength)

/** [Adapters.loadAll], with the strength of each path. */
fun LogicalTensors.loadAdapters(strengths: Map<String, Double>, programScale: Double? = null): Long =
    Adapters.loadAll(this, strengths.keys.toList(), strengths.values.toDoubleArray(), programScale.optional())

/** [Adapters.merge]. */
fun LogicalTensors.mergeAdapter(path: String, alpha: Double = 1.0): MergedAdapter = Adapters.merge(this, path, alpha)

/** [SGD.of]. */
fun sgd(
    lr: Double,
    momentum: Double = 0.0,
    dampening: Double = 0.0,
    weightDecay: Double = 0.0,
    nesterov: Boolean = false,
): SGD = SGD.of(lr, momentum, dampening, weightDecay, nesterov)

/** [AdamW.of], with torch's defaults. */
fun adamW(
    lr: Double = 1e-3,
    beta1: Double = 0.9,
    beta2: Double = 0.999,
    eps: Double = 1e-8,
    weightDecay: Double = 0.01,
    amsgrad: Boolean = false,
): AdamW = AdamW.of(lr, beta1, beta2, eps, weightDecay, amsgrad)

/** [MeZO.of]. */
fun meZO(cache: BlobCache, vararg names: String, lr: Double = 1e-6, eps: Double = 1e-3, seed: Long = 0): MeZO =
    MeZO.of(cache, lr, eps, seed, *names)

/** [TrainingProgram.publish]. */
fun TrainingProgram.publish(target: LogicalTensors, strict: Boolean = true, finite: Boolean = true): Long =
    publish(target, strict, finite)

/** [Runners.of]. */
fun runnersOf(runners: List<TextRunner>, caches: List<BlobCache>, programScale: Double? = null): Runners =
    Runners.of(runners, caches, programScale.optional())

/** [Method.execute], on another thread. */
suspend fun Method.awaitExecute(
    vararg inputs: Any?,
    dispatcher: CoroutineDispatcher = Dispatchers.Default,
): Outputs = withContext(dispatcher) { execute(*inputs) }

/** [TrainingProgram.step], on another thread. */
suspend fun TrainingProgram.awaitStep(
    optimizer: Optimizer,
    vararg inputs: Any?,
    onNan: TrainingProgram.OnNan = TrainingProgram.OnNan.THROW,
    dispatcher: CoroutineDispatcher = Dispatchers.Default,
): Outputs = withContext(dispatcher) { step(optimizer, onNan, *inputs) }

/** Any other call that reads files or waits: `awaiting { Program.load(path, cache) }`. */
suspend fun <T> awaiting(dispatcher: CoroutineDispatcher = Dispatchers.IO, call: () -> T): T =
    withContext(dispatcher) { call() }

/** [Runners.generate], on another thread. If the coroutine is cancelled, [stop] ends the request at its next token. */
suspend fun Runners.awaitGenerate(
    prompt: String,
    request: Request = Request(),
    stop: Stop = Stop(),
    dispatcher: CoroutineDispatcher = Dispatchers.IO,
): String = coroutineScope {
    val answer = async(dispatcher) { generate(prompt, request.stop(stop)) }
    try {
        answer.await()
    } catch (cancelled: CancellationException) {
        stop.set()
        throw cancelled
    }
}

/** [Release.follow], on another thread. */
suspend fun Release.awaitFollow(
    adapters: Release.FollowAdapters = Release.FollowAdapters.KEEP,
    dispatcher: CoroutineDispatcher = Dispatchers.IO,
): Followed = withContext(dispatcher) { follow(adapters) }

/** [Releases.pull], on another thread, with a downloader that may suspend. It is cancelled between two downloads. */
suspend fun awaitPull(
    url: String,
    directory: String,
    options: ReleaseOptions = ReleaseOptions(),
    dispatcher: CoroutineDispatcher = Dispatchers.IO,
    download: suspend (url: String, range: String, file: String) -> Unit,
): InstalledRelease = withContext(dispatcher) {
    val context = currentCoroutineContext()
    Releases.pull(
        url,
        directory,
        { from, range, file ->
            context.ensureActive()
            runBlocking { download(from, range, file) }
        },
        options,
    )
}
