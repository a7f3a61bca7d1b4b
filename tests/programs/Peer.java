// Both ends of the checks in java.py:
// java Peer nio-server|nio-client|blocking-server|blocking-client PORT [CONNECTIONS SEED]

import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;

public class Peer {
    static final int PING_ROUNDS = 50;
    static final int PING_LARGEST = 5_000;
    static final int BULK_BYTES = 4_000_000;
    static final int BUFFER_BYTES = 70_000;
    static final int SELECT_MILLISECONDS = 60_000;

    public static void main(String[] words) throws Exception {
        String host = System.getenv().getOrDefault("SERVER_ADDRESS", "127.0.0.1");
        InetSocketAddress address = new InetSocketAddress(InetAddress.getByName(host), Integer.parseInt(words[1]));
        switch (words[0]) {
            case "nio-server" -> nioServer(address);
            case "blocking-server" -> blockingServer(address);
            case "nio-client" -> nioClient(address, Integer.parseInt(words[2]), Long.parseLong(words[3]));
            case "blocking-client" -> blockingClient(address, Integer.parseInt(words[2]), Long.parseLong(words[3]));
            default -> throw new IllegalArgumentException(words[0]);
        }
    }

    // Servers: send everything back until the client ends its half, then end the other.

    static void nioServer(InetSocketAddress address) throws IOException {
        Selector selector = Selector.open();
        ServerSocketChannel listener = ServerSocketChannel.open();
        listener.bind(address, 128);
        listener.configureBlocking(false);
        listener.register(selector, SelectionKey.OP_ACCEPT);
        while (true) {
            selector.select();
            for (SelectionKey key : selector.selectedKeys()) {
                if (key.isAcceptable()) {
                    SocketChannel accepted = listener.accept();
                    accepted.configureBlocking(false);
                    accepted.register(selector, SelectionKey.OP_READ, ByteBuffer.allocateDirect(BUFFER_BYTES));
                } else {
                    echo(key);
                }
            }
            selector.selectedKeys().clear();
        }
    }

    /** Reads until the buffer is full, then writes until it is empty, never blocking. */
    static void echo(SelectionKey key) throws IOException {
        SocketChannel channel = (SocketChannel) key.channel();
        ByteBuffer buffer = (ByteBuffer) key.attachment();
        boolean ended = key.isReadable() && channel.read(buffer) < 0;
        buffer.flip();
        channel.write(buffer);
        boolean empty = !buffer.hasRemaining();
        buffer.compact();
        if (ended && empty) {
            channel.close();
        } else {
            // Reading goes on only when all is written, so the end can't be seen while bytes are left.
            key.interestOps(empty ? SelectionKey.OP_READ : SelectionKey.OP_WRITE);
        }
    }

    static void blockingServer(InetSocketAddress address) throws IOException {
        ServerSocket listener = new ServerSocket(address.getPort(), 128, address.getAddress());
        while (true) {
            Socket socket = listener.accept();
            new Thread(() -> {
                try (socket) {
                    socket.getInputStream().transferTo(socket.getOutputStream());
                } catch (IOException problem) {
                    problem.printStackTrace();
                }
            }).start();
        }
    }

    // Clients: small messages there and back, then a bulk both ways at once, ended by half-close.

    static byte[] random(long seed, int number, int round, int size) {
        byte[] bytes = new byte[size];
        new Random(seed ^ ((long) number << 32) ^ round).nextBytes(bytes);
        return bytes;
    }

    static byte[] ping(long seed, int number, int round) {
        return random(seed, number, round, 1 + new Random(seed + number * 1_000 + round).nextInt(PING_LARGEST));
    }

    static byte[] bulk(long seed, int number) {
        return random(seed, number, PING_ROUNDS, BULK_BYTES);
    }

    static void check(boolean condition, String what) {
        if (!condition) {
            throw new AssertionError(what);
        }
    }

    static void hold() throws IOException {
        System.out.println("hold");
        System.in.read();
    }

    static void blockingClient(InetSocketAddress address, int connections, long seed) throws Exception {
        CyclicBarrier met = new CyclicBarrier(connections, () -> {
            try {
                hold();
            } catch (IOException problem) {
                throw new IllegalStateException(problem);
            }
        });
        ExecutorService threads = Executors.newCachedThreadPool();
        List<Future<?>> talks = new ArrayList<>();
        for (int number = 0; number < connections; number++) {
            int mine = number;
            talks.add(threads.submit(() -> {
                blockingTalk(threads, address, met, seed, mine);
                return null;
            }));
        }
        for (Future<?> talk : talks) {
            talk.get();
        }
        threads.shutdown();
        System.out.println("all equal");
    }

    static void blockingTalk(
            ExecutorService threads, InetSocketAddress address, CyclicBarrier met, long seed, int number)
            throws Exception {
        try (Socket socket = new Socket(address.getAddress(), address.getPort())) {
            socket.setTcpNoDelay(true);
            InputStream in = socket.getInputStream();
            OutputStream out = socket.getOutputStream();
            for (int round = 0; round < PING_ROUNDS; round++) {
                byte[] ping = ping(seed, number, round);
                out.write(ping);
                check(Arrays.equals(in.readNBytes(ping.length), ping), "ping " + round + " of " + number + " differs");
            }
            met.await();
            byte[] bulk = bulk(seed, number);
            Future<?> sender = threads.submit(() -> {
                out.write(bulk);
                socket.shutdownOutput();
                return null;
            });
            check(Arrays.equals(in.readAllBytes(), bulk), "the bulk of " + number + " differs");
            sender.get();
        }
    }

    /** One connection of the NIO client: what is still to be sent, what must come back, and what came. */
    static final class Talk {
        final int number;
        int round = -1;
        byte[] wanted;
        ByteBuffer outgoing;
        ByteBuffer received;

        Talk(int number) {
            this.number = number;
        }

        void start(byte[] bytes) {
            round++;
            wanted = bytes;
            outgoing = ByteBuffer.wrap(bytes);
            received = ByteBuffer.allocate(bytes.length + 1); // room for a byte too many
        }
    }

    static void nioClient(InetSocketAddress address, int connections, long seed) throws IOException {
        Selector selector = Selector.open();
        for (int number = 0; number < connections; number++) {
            SocketChannel channel = SocketChannel.open();
            channel.configureBlocking(false);
            channel.connect(address);
            channel.register(selector, SelectionKey.OP_CONNECT, new Talk(number));
        }
        int pinging = connections;
        int open = connections;
        while (open > 0) {
            check(selector.select(SELECT_MILLISECONDS) > 0, "nothing happened on any connection");
            for (SelectionKey key : selector.selectedKeys()) {
                SocketChannel channel = (SocketChannel) key.channel();
                Talk talk = (Talk) key.attachment();
                if (key.isConnectable()) {
                    channel.finishConnect();
                    talk.start(ping(seed, talk.number, 0));
                    key.interestOps(SelectionKey.OP_READ | SelectionKey.OP_WRITE);
                    continue;
                }
                if (key.isWritable()) {
                    channel.write(talk.outgoing);
                    if (!talk.outgoing.hasRemaining()) {
                        key.interestOps(SelectionKey.OP_READ);
                        if (talk.round == PING_ROUNDS) {
                            channel.shutdownOutput();
                        }
                    }
                }
                if (key.isReadable()) {
                    boolean ended = channel.read(talk.received) < 0;
                    boolean last = talk.round == PING_ROUNDS;
                    check(!ended || last, "connection " + talk.number + " ended early");
                    if (last ? !ended : talk.received.position() < talk.wanted.length) {
                        continue;
                    }
                    byte[] got = Arrays.copyOf(talk.received.array(), talk.received.position());
                    check(Arrays.equals(got, talk.wanted), "round " + talk.round + " of " + talk.number + " differs");
                    if (last) {
                        channel.close();
                        open--;
                    } else if (talk.round + 1 < PING_ROUNDS) {
                        talk.start(ping(seed, talk.number, talk.round + 1));
                        key.interestOps(SelectionKey.OP_READ | SelectionKey.OP_WRITE);
                    } else if (--pinging == 0) {
                        hold();
                        for (SelectionKey each : selector.keys()) {
                            Talk other = (Talk) each.attachment();
                            other.start(bulk(seed, other.number));
                            each.interestOps(SelectionKey.OP_READ | SelectionKey.OP_WRITE);
                        }
                    }
                }
            }
            selector.selectedKeys().clear();
        }
        System.out.println("all equal");
    }
}
