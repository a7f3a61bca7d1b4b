// An omniORB server that gives a block back, and a client that asks for it.
//
//     orb server FILE -ORBendPoint giop:tcp:127.0.0.1:PORT     its reference goes into FILE
//     orb client FILE BYTES COUNT
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>

#include "block.hh"

class Servant : public POA_Echo {
    Echo::Block *back(const Echo::Block &block) override { return new Echo::Block(block); }
};

static int serve(CORBA::ORB_ptr orb, const std::string &file) {
    CORBA::Object_var root = orb->resolve_initial_references("RootPOA");
    PortableServer::POA_var poa = PortableServer::POA::_narrow(root);
    PortableServer::Servant_var<Servant> servant = new Servant;
    PortableServer::ObjectId_var id = poa->activate_object(servant);
    CORBA::Object_var object = poa->id_to_reference(id);
    CORBA::String_var reference = orb->object_to_string(object);
    poa->the_POAManager()->activate();
    std::ofstream(file + ".new") << reference;
    std::rename((file + ".new").c_str(), file.c_str());
    orb->run();
    return 0;
}

static int ask(CORBA::ORB_ptr orb, const std::string &file, int bytes, int count) {
    std::string reference;
    std::ifstream(file) >> reference;
    CORBA::Object_var object = orb->string_to_object(reference.c_str());
    Echo_var echo = Echo::_narrow(object);
    Echo::Block block;
    block.length(bytes);
    auto began = std::chrono::steady_clock::now();
    for (int done = -count / 10; done < count; done++) {
        if (done == 0) {
            began = std::chrono::steady_clock::now();
        }
        Echo::Block_var answer = echo->back(block);
        if (answer->length() != block.length()) {
            std::cerr << "the answer has " << answer->length() << " bytes\n";
            return 1;
        }
    }
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    std::cout << "rate " << count / took.count() << "\n";
    return 0;
}

int main(int argc, char **argv) {
    CORBA::ORB_var orb = CORBA::ORB_init(argc, argv);
    std::string role = argc > 2 ? argv[1] : "";
    if (role == "server") {
        return serve(orb, argv[2]);
    }
    if (role == "client" && argc == 5) {
        return ask(orb, argv[2], std::atoi(argv[3]), std::atoi(argv[4]));
    }
    std::cerr << "orb server FILE | client FILE BYTES COUNT\n";
    return 2;
}
