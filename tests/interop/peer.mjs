// A js-libp2p peer that a test drives: one JSON object a line on stdin, {id, do, ...}; its answer on stdout, {id, result} or
// {id, error}. The first line on stdout says who it is. It ends when stdin does.
Promise.withResolvers ??= () => {
  const parts = {}
  parts.promise = new Promise((resolve, reject) => Object.assign(parts, { resolve, reject }))
  return parts
}

// Imported when that is there: node 20 lacks it.
const { createInterface } = await import('node:readline')
const { createLibp2p } = await import('libp2p')
const { tcp } = await import('@libp2p/tcp')
const { noise } = await import('@chainsafe/libp2p-noise')
const { yamux } = await import('@chainsafe/libp2p-yamux')
const { identify } = await import('@libp2p/identify')
const { ping } = await import('@libp2p/ping')
const { circuitRelayServer, circuitRelayTransport } = await import('@libp2p/circuit-relay-v2')
const { multiaddr } = await import('@multiformats/multiaddr')

const ECHO = '/tela/echo/1'
const RESET = '/tela/reset/1'
const MAX_STREAMS = 512
const limits = { maxInboundStreams: MAX_STREAMS, maxOutboundStreams: MAX_STREAMS, runOnLimitedConnection: true }

const node = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp(), circuitRelayTransport()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  connectionGater: { denyDialMultiaddr: () => false },
  services: {
    identify: identify({ runOnConnectionOpen: false }),
    ping: ping(),
    relay: circuitRelayServer({ reservations: { applyDefaultLimit: false } })
  }
})

// Resolves when all that the peer sent has been delivered. The iterator of a stream is of no use here: it ends at the
// peer's FIN although data is still to come, and never where the FIN came before it was asked.
function drained (stream, onMessage) {
  return new Promise((resolve, reject) => {
    const settle = () => stream.status === 'reset' ? reject(new Error('the peer reset the stream')) : resolve()
    stream.addEventListener('message', event => onMessage(event.data.subarray()))
    stream.addEventListener('end', settle)
    stream.addEventListener('close', settle)
    if (stream.readableEnded) settle()
  })
}

async function send (stream, data) {
  if (!stream.send(data)) await stream.onDrain()
}

await node.handle(ECHO, async stream => {
  await drained(stream, data => stream.send(data))
  await stream.close()
}, limits)
await node.handle(RESET, stream => {
  stream.addEventListener('message', () => stream.abort(new Error('as asked')))
}, limits)

function pattern (nBytes) {
  return Uint8Array.from({ length: nBytes }, (_, index) => index % 251)
}

// The bytes that come back for what was sent; the stream is half-closed behind it.
async function exchange (connection, protocol, sent) {
  const stream = await connection.newStream(protocol, limits)
  const chunks = []
  const over = drained(stream, data => chunks.push(data))
  over.catch(() => {}) // it is awaited below: a reset before that is no unhandled one, which would end the process
  await send(stream, sent)
  await stream.close()
  await over
  return Buffer.concat(chunks)
}

async function echo (connection, protocol, nBytes) {
  const sent = pattern(nBytes)
  const received = await exchange(connection, protocol, sent)
  return { isSame: received.equals(sent), nBytes: received.length }
}

function connectionTo (peer) {
  const connection = node.getConnections().find(each => each.remotePeer.toString() === peer)
  if (connection == null) throw new Error(`no connection to ${peer}`)
  return connection
}

const commands = {
  dial: async ({ address }) => (await node.dial(multiaddr(address))).remotePeer.toString(),
  ping: async ({ peer }) => await node.services.ping.ping(connectionTo(peer).remotePeer),
  echo: async ({ peer, protocol = ECHO, nBytes }) => await echo(connectionTo(peer), protocol, nBytes),
  echoes: async ({ peer, nStreams, nBytes }) => {
    const connection = connectionTo(peer)
    const results = await Promise.all(Array.from({ length: nStreams }, () => echo(connection, ECHO, nBytes)))
    return results.filter(each => each.isSame).length
  },
  exchange: async ({ peer, protocol, hex }) =>
    (await exchange(connectionTo(peer), protocol, Buffer.from(hex, 'hex'))).toString('hex'),
  identify: async ({ peer }) => {
    const seen = await node.services.identify.identify(connectionTo(peer))
    return {
      agent: seen.agentVersion,
      listen: seen.listenAddrs.map(String),
      protocols: seen.protocols
    }
  },
  listen: async ({ address }) => await node.components.transportManager.listen([multiaddr(address)]),
  peers: async () => node.getPeers().map(String),
  disconnect: async ({ peer }) => { await connectionTo(peer).close() }
}

const say = answer => process.stdout.write(JSON.stringify(answer) + '\n')
say({ peer: node.peerId.toString(), addresses: node.getMultiaddrs().map(String) })
for await (const line of createInterface({ input: process.stdin })) {
  const { id, do: name, ...rest } = JSON.parse(line)
  commands[name](rest).then(
    result => say({ id, result: result ?? null }),
    error => say({ id, error: `${error.name}: ${error.message}` })
  )
}
await node.stop()
process.exit(0)
